"""nodemend: finds sick GPU nodes of Amazon EKS clusters and mends the cluster."""
