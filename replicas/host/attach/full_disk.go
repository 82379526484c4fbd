package attach

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// fullDisks names the full disks of a volume whose writes wait: the disks of all members, since the engine drops a
// member with a full disk while another member has room.
func (as *Attachments) fullDisks(ctx context.Context, s *Session) string {
	s.membership.mu.Lock()
	on := slices.Clone(s.Members)
	s.membership.mu.Unlock()
	var names []string
	for _, m := range on {
		names = append(names, fmt.Sprintf("%s of node %s", as.pathOf(ctx, m), m.Node))
	}
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) == 1 {
		return "disk " + names[0] + " is full"
	}
	return "the disks of all replicas are full: " + strings.Join(names, ", ")
}

// pathOf is the path of a replica's disk, or else the uid.
func (as *Attachments) pathOf(ctx context.Context, m memberSpec) string {
	if m.Path != "" {
		return m.Path
	}
	var n api.Node
	if as.Client.Get(ctx, client.ObjectKey{Name: m.Node}, &n) == nil {
		if i := slices.IndexFunc(n.Status.Disks, func(s api.DiskStatus) bool { return s.UID == m.Disk }); i >= 0 {
			return n.Status.Disks[i].Path
		}
	}
	return string(m.Disk)
}
