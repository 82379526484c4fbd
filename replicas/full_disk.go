package replicas

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// fullDisks names the disks that have no room where writes to a volume wait: those of all its members, since one that
// is full while another is not is dropped.
func (d *Data) fullDisks(ctx context.Context, s *session) string {
	s.mates.mu.Lock()
	on := slices.Clone(s.Members)
	s.mates.mu.Unlock()
	var names []string
	for _, m := range on {
		names = append(names, fmt.Sprintf("%s of node %s", d.pathOf(ctx, m), m.Node))
	}
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) == 1 {
		return "disk " + names[0] + " is full"
	}
	return "the disks of all replicas are full: " + strings.Join(names, ", ")
}

// pathOf is where the disk of a replica is, or its uid.
func (d *Data) pathOf(ctx context.Context, m memberSpec) string {
	if m.Path != "" {
		return m.Path
	}
	var n api.Node
	if d.Client.Get(ctx, client.ObjectKey{Name: m.Node}, &n) == nil {
		if i := slices.IndexFunc(n.Status.Disks, func(s api.DiskStatus) bool { return s.UID == m.Disk }); i >= 0 {
			return n.Status.Disks[i].Path
		}
	}
	return string(m.Disk)
}
