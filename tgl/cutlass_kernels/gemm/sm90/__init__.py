"""Hopper: warpgroup MMAs fed by TMA."""
