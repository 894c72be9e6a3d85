"""`find_float32_layers`: the smallest set of layers to keep in float32."""
