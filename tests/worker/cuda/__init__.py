"""The CUDA path: on a GPU if there is one, else by Triton's interpreter over CPU tensors."""
