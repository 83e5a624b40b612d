"""How others see a workflow: PettingZoo's AEC environment, spaces, bridges, a terminal."""
