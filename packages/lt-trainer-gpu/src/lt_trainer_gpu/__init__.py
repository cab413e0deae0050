"""The torch-native engine of lt: FSDP2 on CUDA and, with the same code, on the CPU."""
