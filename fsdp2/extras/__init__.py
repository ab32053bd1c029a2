"""Optional features, such as whole parameters, layers in tiles, and activations in host memory. Layer: extras."""
