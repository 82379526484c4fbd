package cli

import (
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// completeNames offers the names of objects on <Tab>, or nothing if the server does not answer.
func (a *app) completeNames(list func() client.ObjectList, once bool) cobra.CompletionFunc {
	return func(cmd *cobra.Command, got []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if once && len(got) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var found []string
		for _, o := range a.listObjects(cmd, list()) {
			if strings.HasPrefix(o.GetName(), prefix) {
				found = append(found, o.GetName())
			}
		}
		return found, cobra.ShellCompDirectiveNoFileComp
	}
}

// listObjects lists the objects of a kind, or nothing if the server does not answer.
func (a *app) listObjects(cmd *cobra.Command, list client.ObjectList) []client.Object {
	a.output = "table"
	c, err := a.newClient()
	if err != nil {
		return nil
	}
	if err := c.List(cmd.Context(), list); err != nil {
		return nil
	}
	var out []client.Object
	_ = meta.EachListItem(list, func(o runtime.Object) error {
		out = append(out, o.(client.Object))
		return nil
	})
	return out
}

func volumes() client.ObjectList   { return &api.VolumeList{} }
func snapshots() client.ObjectList { return &api.SnapshotList{} }
func images() client.ObjectList    { return &api.BackingImageList{} }
func targets() client.ObjectList   { return &api.BackupTargetList{} }
func backups() client.ObjectList   { return &api.BackupList{} }
func nodes() client.ObjectList     { return &api.NodeList{} }

// completeDisks offers the paths of disks.
func (a *app) completeDisks(cmd *cobra.Command, got []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(got) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var found []string
	for _, o := range a.listObjects(cmd, nodes()) {
		for _, d := range o.(*api.Node).Spec.Disks {
			if strings.HasPrefix(d.Path, prefix) {
				found = append(found, d.Path)
			}
		}
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}

// completeSources offers sources of a new volume or image: volumes and snapshots.
func (a *app) completeSources(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	vols, _ := a.completeNames(volumes, false)(cmd, nil, prefix)
	snaps, d := a.completeNames(snapshots, false)(cmd, nil, prefix)
	return append(vols, snaps...), d
}

// completeFlags registers the completions of the flags of a command and its subcommands by flag name, because a name
// means the same everywhere. Other flags take files or free text.
func (a *app) completeFlags(c *cobra.Command) {
	values := map[string]cobra.CompletionFunc{
		"output":        completeWords("table", "wide", "json", "yaml", "name"),
		"fs":            completeWords("ext4", "xfs", "btrfs"),
		"clone-mode":    completeWords(api.CloneLinked, api.CloneFull),
		"data-locality": completeWords("disabled", "best-effort", "strict-local"),
		"auto-balance":  completeWords("ignored", "disabled", "least-effort", "best-effort"),
		"format":        completeWords("raw", "qcow2"),
		"image":         a.completeNames(images, false),
		"node":          a.completeNames(nodes, false),
		"target":        a.completeNames(targets, false),
		"volume":        a.completeNames(volumes, false),
		"snapshot":      a.completeNames(snapshots, false),
		"from":          a.completeSources,
	}
	if c.Name() == "cleanup" {
		values["disk"] = func(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
			return a.completeDisks(cmd, nil, prefix)
		}
	}
	for name, f := range values {
		if c.Flags().Lookup(name) == nil && c.PersistentFlags().Lookup(name) == nil {
			continue
		}
		// The call fails only for a second completion or an unknown flag.
		_ = c.RegisterFlagCompletionFunc(name, f)
	}
	for _, sub := range c.Commands() {
		a.completeFlags(sub)
	}
}

// completeWords completes to fixed values.
func completeWords(all ...string) cobra.CompletionFunc {
	return cobra.FixedCompletions(all, cobra.ShellCompDirectiveNoFileComp)
}
