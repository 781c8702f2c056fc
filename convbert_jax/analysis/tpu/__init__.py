"""Memory, time and traffic of TPU programs, estimated by the TPU compiler."""
