"""Files of torch.save, by torch itself."""
