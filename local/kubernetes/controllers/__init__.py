"""What the control plane and the kubelets do between two requests."""
