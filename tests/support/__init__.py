"""What tests share: oracles, and a simulated GPU."""
