"""Files that torch.save wrote, read without PyTorch and without running anything of them."""
