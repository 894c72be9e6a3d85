"""Operations of Keras' backends that fail in half precision, repaired."""
