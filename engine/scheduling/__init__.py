"""What runs and how far: queue and token-budget scheduler. Pure Python; knows no runner and no clock."""
