"""What layers have learned: measures of attention weights, and how static attention is."""
