package api

// RevertInProgress returns a Busy error while the volume is being reverted: from the revert's new epoch until the
// revert's end no engine claims the volume.
func (v *Volume) RevertInProgress() error {
	wish, is := v.Spec.RevertTo, v.Status.Reverted
	if wish != nil && is != nil && is.ID == wish.ID && is.State == CloneInitiated {
		return Errorf(Busy, "volume %s is being reverted", v.Name)
	}
	return nil
}

// RevertPending returns a Busy error while the replica has yet to carry out the revert in the replica's spec. Until
// then nothing else may change the replica.
func (r *Replica) RevertPending() error {
	if r.Spec.Revert != nil && r.Spec.Revert.ID != r.Status.Reverted {
		return Errorf(Busy, "volume %s is being reverted", r.Spec.Volume)
	}
	return nil
}
