package restoring

import (
	"bytes"
	"context"
	"crypto/sha256"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// otherBackup is a backup with unknown digests, or with a restore that writes other bytes into chunk 1.
type otherBackup struct {
	*backup
	unknown bool
}

func (b *otherBackup) Digests(ctx context.Context, each func(int64, [32]byte)) error {
	if b.unknown {
		return api.Errorf(api.Unsupported, "the digests are not known")
	}
	return b.backup.Digests(ctx, each)
}

func (b *otherBackup) RestoreIntact(ctx context.Context, sink block.Sink, skip func(int64) bool) (damaged []int64,
	err error) {
	for c := range b.chunks() {
		p := b.part(c)
		if c == 1 && !b.unknown {
			p = bytes.Repeat([]byte{1}, len(p))
		}
		if skip(c) {
			continue
		}
		err := sink.(block.DigestSink).WriteChunk(p, c*chunk, sha256.Sum256(p))
		if api.Is(err, api.Corrupt) {
			damaged = append(damaged, c)
		} else if err != nil {
			return nil, err
		}
	}
	return damaged, sink.Sync(ctx)
}

// otherWorld is newWorld with an otherBackup.
func otherWorld(t *testing.T, unknown bool) *world {
	t.Helper()
	w := newWorld(t, newStore(3*chunk))
	w.set.Remove(w.disk.UID(), w.uid())
	w.l = w.set.Add(w.disk, w.uid(), func(ctx context.Context) (block.Backup, error) {
		b, err := w.open(ctx)
		if err != nil {
			return nil, err
		}
		return &otherBackup{b.(*backup), unknown}, nil
	})
	return w
}

// TestChunkOfAnotherDigestIsNotWritten: a restore leaves a chunk with another digest than the plan has out, as damaged.
func TestChunkOfAnotherDigestIsNotWritten(t *testing.T) {
	t.Parallel()
	w := otherWorld(t, false)
	w.plan()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	fill := w.l.Fill(false)
	fill.Pause = func(context.Context, func(context.Context)) error {
		cancel()
		return context.Canceled
	}
	w.compare(w.source(), 0)
	sink, err := w.disk.Create(ctx, w.uid(), 3*chunk)
	must(t, err)
	defer func() { _ = sink.Abort() }()
	if err := fill.Restore(ctx, sink); err == nil {
		t.Error("a chunk with another digest is accepted")
	}
	if len(fill.Damaged) != 1 || fill.Damaged[0] != 1 {
		t.Errorf("the damaged chunks are %v, want 1", fill.Damaged)
	}
}

// TestBackupWithoutDigestsIsRestoredWhole: the layer of a backup with unknown digests cannot be read before the end of
// the restore, and has the root digest of a planned layer.
func TestBackupWithoutDigestsIsRestoredWhole(t *testing.T) {
	t.Parallel()
	known := newWorld(t, newStore(3*chunk))
	root := known.plan()
	w := otherWorld(t, true)
	if _, _, readable, err := w.l.Open(t.Context()); readable || err != nil {
		t.Errorf("the layer is readable: %v, %v", readable, err)
	}
	if why := w.l.Unreadable(); !strings.Contains(why, "the digests are not known") || known.l.Unreadable() != "" {
		t.Errorf("the layer cannot be read: %q, and a planned one: %q", why, known.l.Unreadable())
	}
	got, err := w.restore(w.l.Fill(false))
	if err != nil || got.Digest != root {
		t.Errorf("the restored layer has the root %s, %v; the digests tell %s", got.Digest, err, root)
	}
}
