"""What makes a step faster or smaller, and can be left out."""
