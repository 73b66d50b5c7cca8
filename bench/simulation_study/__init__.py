"""The simulated study: docs/measurements/simulated.md and its pictures, one module for each part."""
