"""What comes after pretraining: conversations, preferences and verifiable rewards, as objectives of the one loop."""
