"""What a module computes with beside inputs, parameters and buffers: found while it is traced, and watched later."""
