"""Files of torch.save, read without running what is in them and written without torch."""
