package targets

import (
	"context"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// TestOnlyTheMakerAdopts: a node that lost a Backup to another node leaves the Backup's snapshots alone, and asks after
// it has listed them.
func TestOnlyTheMakerAdopts(t *testing.T) {
	s := newShelf(t, "x")
	f := factsOf("b")
	f.Object = uid(1)
	adopt := func(context.Context, *repo.Repository, repo.Snapshot) (id blob.ID, complete bool, err error) {
		t.Error("a snapshot was adopted")
		return id, true, nil
	}
	ours, late := s.save(100, f.Tags()...), ""
	adopted, err := AdoptSnapshot(t.Context(), s.r, f.Object, func(context.Context) error {
		late = s.save(100, f.Tags()...).String()
		return api.Errorf(api.Busy, "this node does not make the backup any more")
	}, adopt)
	if adopted != nil || !api.Is(err, api.Busy) || late == "" || !s.has(ours) {
		t.Errorf("adopted %+v, %v, the snapshot exists: %v", adopted, err, s.has(ours))
	}
	adopted, err = AdoptSnapshot(t.Context(), s.r, uid(2), func(context.Context) error {
		t.Error("there is nothing to adopt")
		return nil
	}, adopt)
	if adopted != nil || err != nil {
		t.Errorf("adopted %+v, %v", adopted, err)
	}
}
