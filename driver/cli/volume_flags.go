package cli

import (
	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// volumeFlags are the flags of a new volume.
type volumeFlags struct {
	size, nodeTags, diskTags string
	labels                   map[string]string
	defaults                 bool // take nothing over from the volume of a backup
	volume                   api.Volume
}

// addShared adds the flags for every new volume.
func (f *volumeFlags) addShared(c *cobra.Command) {
	spec := &f.volume.Spec
	c.Flags().Int32Var(&spec.NumberOfReplicas, "replicas", 1, "number of replicas")
	c.Flags().StringVar(&spec.DataLocality, "data-locality", "",
		"disabled, best-effort (a replica moves to the node of the attached volume) or strict-local (only the node of "+
			"the replica attaches the volume)")
	c.Flags().StringVar(&spec.ReplicaAutoBalance, "auto-balance", "",
		"whether replicas move to better places: ignored (as the setting says), disabled, least-effort or best-effort")
	c.Flags().StringVar(&f.nodeTags, "node-selector", "", "only nodes with these tags: a,b")
	c.Flags().StringVar(&f.diskTags, "disk-selector", "", "only disks with these tags: a,b")
	c.Flags().StringToStringVar(&f.labels, "label", nil, "label of the volume: KEY=VALUE; repeatable")
}

// applyShared brings the flags for every new volume that are no field of the volume into the volume. A volume with the
// content of a backup takes over what record tells, but for the flags that the user gave; record may be nil.
func (f *volumeFlags) applyShared(c *cobra.Command, record *api.RecordedVolume) {
	given, v := f.volume.Spec, &f.volume
	given.NodeSelector, given.DiskSelector = parseTags(f.nodeTags), parseTags(f.diskTags)
	inherits := record != nil && !f.defaults
	if inherits {
		record.ApplyTo(v)
	}
	for flag, set := range map[string]func(){
		"replicas":      func() { v.Spec.NumberOfReplicas = given.NumberOfReplicas },
		"data-locality": func() { v.Spec.DataLocality = given.DataLocality },
		"auto-balance":  func() { v.Spec.ReplicaAutoBalance = given.ReplicaAutoBalance },
		"node-selector": func() { v.Spec.NodeSelector = given.NodeSelector },
		"disk-selector": func() { v.Spec.DiskSelector = given.DiskSelector },
	} {
		if !inherits || c.Flags().Changed(flag) {
			set()
		}
	}
	for key, value := range f.labels {
		metav1.SetMetaDataLabel(&v.ObjectMeta, key, value)
	}
}
