"""What a person must do now, by the reason's code. Shown in the closing event and in the docs."""

_CORDON_STAYS = "The node stays cordoned (annotation nodemend/incident says by which incident). "
_UNCORDON = "Afterwards put the node back as docs/runbooks/put-a-node-back.md says."

REMEDIES = {
    "blocked_by_pdb": _CORDON_STAYS
    + "Make room in the PodDisruptionBudget that the reason names, or delete the pod; then start "
    "the remediation again by hand.",
    "blocked_by_multiple_pdbs": _CORDON_STAYS
    + "Two PodDisruptionBudgets select the pod, so it can never be evicted: remove one of them, "
    "then start the remediation again by hand.",
    "drain_deadline": _CORDON_STAYS
    + "Find out why the pods that the reason names do not end, then start the remediation again.",
    "cluster_forbidden": "Apply docs/kubernetes/rbac.yaml to the cluster; the reason "
    "names the verb and resource that RBAC denied. " + _UNCORDON,
    "cluster_unauthorized": "Check the EKS access entry of nodemend's role (cluster-access.yaml) "
    "and the cluster's authentication mode.",
    "cluster_unavailable": "The Kubernetes API could not be reached: check the security group, "
    "the private endpoint and the function's subnets.",
    "aws_forbidden": "Allow the IAM action that the reason names for the cluster's role, then "
    "start the remediation again by hand. " + _UNCORDON,
    "asg_suspended": "Resume the processes that the reason names, then start the remediation "
    "again by hand.",
    "capacity_kind_unsupported": "Replace the node by hand: this version replaces nodes of Auto "
    "Scaling groups only.",
    "group_unknown": "Tag the node's Auto Scaling group with kubernetes.io/cluster/<name>, or "
    "replace the node by hand.",
    "other_remediator": "Someone else is acting on the instance or its group, as the reason says; "
    "when that is over, the next scan decides anew.",
    "reboot_not_observed": _CORDON_STAYS + "EC2 took the reboot, and the node did not boot again: "
    "look at the instance's status checks and console output. " + _UNCORDON,
    "reboot_unhealthy": _CORDON_STAYS + "The node has booted again and is still sick; the reason "
    "says of what. Repair it by hand. " + _UNCORDON,
    "boot_id_unknown": _CORDON_STAYS
    + "Look at the node's kubelet: it reports no boot id. "
    + _UNCORDON,
    "approval_denied": "Nothing more is done for this fault on this boot for a day. To repair the "
    "node after all, start the remediation by hand.",
    "approval_expired": "Nobody answered, and the node is in the pool with its fault. Start the "
    "remediation by hand, and see that the topic of ApprovalTopicArn reaches somebody.",
    "attempts_exhausted": "This machine had all the repairs that the policy allows within the "
    "window (attempts). It takes pods again: decide whether it is to go for good, or start the "
    "remediation by hand.",
    "replacement_of_replacement": "The last replacements in this place fell sick one after the "
    "other. Look at what they share: image, driver, launch template, placement, or the rule that "
    "found them. To replace it once more, start the remediation by hand.",
    "repeat_offender": "The repairs of the plan were made for this GPU already, and it is faulty "
    "again: take the machine out for good, and tell AWS Support its instance and GPU. To repair "
    "it once more, start the remediation by hand.",
    "rebooted_meanwhile": _CORDON_STAYS
    + "Somebody rebooted the node while it was being drained. Look whether it is well now; if "
    "not, start the remediation by hand. " + _UNCORDON,
    "replacement_missing": "The instance was terminated and no new one came into service: look at "
    "the group's activities (capacity, launch template).",
    "replacement_unhealthy": "The new node is not fit: the reason says what is missing. Look at "
    "its kubelet, device plugin and GPU driver.",
    "repair_refused": _CORDON_STAYS + "The capacity API refused the repair; the reason has its "
    "words. " + _UNCORDON,
    "cordon_only": "The policy stops after the cordon: repair the node by hand. " + _UNCORDON,
    "policy_invalid": "Deploy a valid policy; the reason says what is wrong with this one.",
    "lease_lost": "The incident's lease was lost, so nothing more was done. A node that was "
    "cordoned stays so. Check it, then start the remediation again by hand.",
    "capacity_lost": "Somebody lowered the group's desired capacity meanwhile: raise it if the "
    "node is still wanted.",
    "metrics_missing": "The new node's GPUs do not all report: look at its dcgm-exporter and the "
    "scraper.",
    "metrics_unknown": "AMP did not answer while the new node was being proven: the reason says "
    "how. Check that node by hand.",
    "namespace_terminating": _CORDON_STAYS
    + "A namespace has been terminating for long: see what holds it (finalizers).",
    "no_repair_left": _CORDON_STAYS
    + "The plan has no further repair: repair the node by hand. "
    + _UNCORDON,
    "not_drained": _CORDON_STAYS + "The node was not drained, so it was not replaced: start the "
    "remediation again by hand.",
    "step_timed_out": "A step ran into its time-out twice: look at its log for the call that "
    "hung. " + _UNCORDON,
    "undecided": "The execution ended without a decision: look at its history. " + _UNCORDON,
    "aws_unavailable": "An AWS API did not answer for minutes: the reason names the call. "
    + _UNCORDON,
    "mode_changed": "The policy's mode was lowered while the remediation ran; a node that was "
    "cordoned stays so. " + _UNCORDON,
    "execution_stopped": "The execution was stopped by hand. If nothing was asked of the node, its "
    "cordon is taken off within a minute or two; a repair that was asked for goes on. " + _UNCORDON,
    "concurrent_update": "The record, the guard or the node kept changing under the step: see who "
    "else writes it, then start the remediation again by hand. " + _UNCORDON,
    "illegal_transition": "Two runs worked on one incident, or a step ran out of its order: look "
    "at the execution's history. " + _UNCORDON,
    "invalid_input": "The reason names the wrong field and its remedy. " + _UNCORDON,
    "waits_long": "See what it waits for in its last Incident Waiting event: a limit that always "
    "binds, a pause that was forgotten, a window that never opens.",
    "past_deadline": "Look at its execution in the Step Functions console. If it hangs, stop it "
    "there: the watch then closes the incident and frees its slot.",
    "cordon_kept": _CORDON_STAYS + "Nothing is under way any more: repair the node or start the "
    "remediation again by hand. " + _UNCORDON,
    "cordon_unreadable": "The annotation nodemend/incident is missing or was changed, so what was "
    "there before is not known. " + _UNCORDON,
    "mode_forbids": "Nothing may be changed in a dry run. " + _UNCORDON,
    "not_gone": "Its replacement works, and its own instance should be terminated: see why it is "
    "not (lifecycle hook, protection), or terminate it.",
    "owner_of_other_node": "The annotation was copied from another node. " + _UNCORDON,
    "owner_unknown": "No record of this stack has the incident. If another stack is at work on the "
    "cluster, remove one of the two. " + _UNCORDON,
    "execution_failed": "Look at the execution in the Step Functions console. If the node is "
    "cordoned, repair it or start the remediation again by hand.",
}


def remedy_for(code: str, *, needs_human: bool) -> str:
    """Return the sentence for a reason's code; a general one if a person must act anyway."""
    if code in REMEDIES:
        return REMEDIES[code]
    return "Read the reason and the incident's timeline, and check the node." if needs_human else ""
