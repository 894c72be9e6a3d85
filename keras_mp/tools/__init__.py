"""What precision does to a model and its training.

inspection       what each layer computes in
diagnosis        what one batch overflows and underflows
float32_search   which layers have to be in float32
comparison       the same training under several policies
breakpoint       a skipped step, saved and repeated
doctor           the devices, and what they are fast in
"""
