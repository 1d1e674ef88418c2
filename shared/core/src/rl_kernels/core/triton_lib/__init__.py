"""What the Triton backends share: where they run, and device functions that two operators use."""
