"""Callbacks for a Trainer that runs a ZeroStrategy."""
