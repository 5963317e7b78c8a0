"""Engine layouts, replicas of engine ranks, and the programs that fill them."""
