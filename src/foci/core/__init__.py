"""What every operator shares; knows no operator."""
