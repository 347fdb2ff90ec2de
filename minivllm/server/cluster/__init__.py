"""Replicas as deployments of Ray Serve: ``minivllm serve --cluster ray``."""
