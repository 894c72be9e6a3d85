"""Operations of Keras that are wrong or missing in half precision, repaired."""
