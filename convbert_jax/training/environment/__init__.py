"""What a run stands on: devices, other processes, signals, the compiler."""
