"""Trainings from a high loss scale and from one that fits, on four devices of JAX."""

import json

import keras
from distributions import distribution
from test_retaking import HIGH, scaler, state_of, trained


def main():
    found = {}
    for kind in ("data", "model"):
        parted = distribution(kind, "dense.*kernel", (None, "model"))
        keras.distribution.set_distribution(parted)
        model, *logs = trained(scaler())
        scale = float(model.optimizer.loss_scale)
        right, *right_logs = trained(scaler(scale))
        found[kind] = {
            "applied": int(model.optimizer.iterations),
            "overflowed": int(model.optimizer.skipped_steps),
            "halvings": HIGH / scale,
            "overflowed at the right scale": int(right.optimizer.skipped_steps),
            "logs are equal": logs == right_logs,
            "differ": [
                variable.path
                for variable, one, other in zip(
                    [*model.variables, *model.optimizer.inner_optimizer.variables],
                    state_of(model),
                    state_of(right),
                    strict=True,
                )
                if one.tobytes() != other.tobytes()
            ],
            "devices": len(model.layers[1].kernel.value.sharding.device_set),
        }
    print(json.dumps(found))


main()
