"""The whole pipeline on one machine: no AWS account, no Docker."""
