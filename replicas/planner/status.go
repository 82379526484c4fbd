package planner

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
)

func equalStatus(a, b *api.VolumeStatus) bool { return equality.Semantic.DeepEqual(a, b) }

// describeVolume computes the status of a volume with members: state, robustness, sizes, conditions.
func describeVolume(v *api.Volume, mine []api.Replica, att *api.Attachment, silent func(node string) bool,
	dead func(*api.Replica) string) {
	st := &v.Status
	st.Message, st.AttachedNode = "", ""
	current, failed, unheard := 0, "", ""
	fetching, fetches := 0, ""
	size := int64(0)
	st.Used, st.Shared = 0, 0
	for _, r := range mine {
		if !slices.Contains(st.Members, r.Name) {
			continue
		}
		if r.Status.Used >= st.Used {
			st.Used, st.Shared = r.Status.Used, r.Status.Shared
		}
		if silent(r.Spec.Node) {
			unheard = r.Spec.Node
		}
		switch r.Status.Mode {
		case api.ReplicaCurrent:
			if silent(r.Spec.Node) {
				break // the status is out of date
			}
			if why := dead(&r); why != "" {
				failed = fmt.Sprintf("replica %s: %s", r.Name, why)
				break
			}
			current++
			if r.Status.Fetching != "" {
				fetching++
				fetches += fmt.Sprintf("; replica %s still fetches %s", r.Name, r.Status.Fetching)
			}
			if size == 0 || r.Status.Size < size {
				size = r.Status.Size
			}
		case api.ReplicaFailed:
			failed = fmt.Sprintf("replica %s: %s", r.Name, r.Status.Message)
		}
	}
	if failed != "" {
		st.Message = failed
	}
	switch {
	case unheard != "" && current == 0:
		st.Robustness = api.RobustUnknown
		st.Message = fmt.Sprintf("node %s gives no sign of life", unheard)
	case current == 0:
		st.Robustness = api.RobustFaulted
		if st.Message == "" {
			st.Message = "no member of the volume can be used"
		}
	case current-fetching < int(v.Spec.NumberOfReplicas):
		st.Robustness = api.RobustDegraded
		if st.Message == "" {
			st.Message = fmt.Sprintf("%d of %d replicas are whole", current-fetching, v.Spec.NumberOfReplicas) + fetches
			if not := notMembers(v, mine); not != "" {
				st.Message += "; not whole: " + not
			}
			if unheard != "" {
				st.Message += "; node " + unheard + " gives no sign of life"
			}
		}
	default:
		st.Robustness = api.RobustHealthy
	}
	describeDamage(v, mine)
	describeMerges(v, mine)
	describeTrim(v, att)
	switch {
	case att == nil:
		st.State = api.VolumeDetached
		if st.Robustness == api.RobustFaulted {
			st.State = api.VolumeFaulted
		}
		meta.RemoveStatusCondition(&st.Conditions, api.ConditionSpace)
	case att.DeletionTimestamp != nil:
		st.State, st.AttachedNode = api.VolumeDetaching, att.Spec.Node
	case att.Status.Ready:
		st.State, st.AttachedNode = api.VolumeAttached, att.Spec.Node
		size = min(size, att.Status.Size)
	default:
		st.State = api.VolumeAttaching
	}
	if att != nil {
		if att.Status.Message != "" && st.Message == "" {
			st.Message = att.Status.Message
		}
		if c := meta.FindStatusCondition(att.Status.Conditions, api.ConditionSpace); c != nil {
			c := *c
			c.ObservedGeneration = v.Generation
			meta.SetStatusCondition(&st.Conditions, c)
		}
	}
	if size > 0 {
		st.Size = size
	}
	if st.Size >= v.Spec.Size {
		setCondition(v, api.ConditionExpanded, true, "Done", "")
	} else if c := meta.FindStatusCondition(st.Conditions, api.ConditionExpanded); c == nil || c.Reason != "NoRoom" {
		setCondition(v, api.ConditionExpanded, false, "Expanding",
			fmt.Sprintf("%s of %s", api.SizeText(st.Size), api.SizeText(v.Spec.Size)))
	}
}

// describeDamage sets the condition for damage that scrubs found.
func describeDamage(v *api.Volume, mine []api.Replica) {
	text, scrubbed := "", false
	for i := range mine {
		st := &mine[i].Status
		scrubbed = scrubbed || st.LastScrubbed != nil
		if n := len(st.Damage); n > 0 && text == "" {
			g := st.Damage[0]
			then := "reads of them fail"
			switch {
			case len(v.Status.Members) < 2 || !slices.Contains(v.Status.Members, mine[i].Name):
			case st.BeyondRepair:
				then = "no other replica has their content: a new replica replaces the damaged one"
			default:
				then = "another replica answers reads of them, and supplies the repair"
			}
			text = fmt.Sprintf("replica %s on node %s: %d ranges are damaged, the first %d bytes at %d in layer %s; %s",
				mine[i].Name, mine[i].Spec.Node, n, g.Length, g.Offset, g.Layer, then)
		}
	}
	switch {
	case text != "":
		api.SetCondition(&v.Status.Conditions, v.Generation, api.ConditionIntact, false, "DigestMismatch", text)
	case scrubbed:
		api.SetCondition(&v.Status.Conditions, v.Generation, api.ConditionIntact, true, "Scrubbed", "")
	default:
		meta.RemoveStatusCondition(&v.Status.Conditions, api.ConditionIntact)
	}
}

// describeMerges sets the condition for replicas whose layers cannot be merged.
func describeMerges(v *api.Volume, mine []api.Replica) {
	text := ""
	for i := range mine {
		if why := mine[i].Status.MergeError; why != "" && text == "" {
			text = fmt.Sprintf("replica %s on node %s: the space of deleted snapshots does not come back: %s; it is tried again",
				mine[i].Name, mine[i].Spec.Node, why)
		}
	}
	switch {
	case text != "":
		setCondition(v, api.ConditionMerged, false, "MergeFailed", text)
	case meta.FindStatusCondition(v.Status.Conditions, api.ConditionMerged) != nil:
		setCondition(v, api.ConditionMerged, true, "Merged", "")
	}
}

// describeTrim copies the result of the last trim from the attachment. Without an attachment a trim fails.
func describeTrim(v *api.Volume, att *api.Attachment) {
	st, wish := &v.Status, v.Spec.Trim
	over := st.Trimmed != nil && st.Trimmed.ID == wish && st.Trimmed.State != api.CloneInitiated
	switch {
	case wish == "" || over:
	case att == nil:
		st.Trimmed = &api.TrimFact{ID: wish, State: api.CloneFailed,
			Message: "the volume is not attached: only a mounted file system can be trimmed"}
	case att.Status.Trimmed != nil && att.Status.Trimmed.ID == wish:
		st.Trimmed = att.Status.Trimmed.DeepCopy()
		slices.Sort(st.Trimmed.Snapshots)
	}
}
