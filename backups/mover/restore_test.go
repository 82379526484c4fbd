package mover

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// TestRestoreListsDamagedChunks: a pack is damaged, another one is lost. A restore ends with an error of kind corrupt;
// with AllowDamaged it writes all other chunks and lists those that lack.
func TestRestoreListsDamagedChunks(t *testing.T) {
	w := newWorld(t)
	v := newDisk(70 * chunkSize)
	o := options("v")
	o.Workers, o.Writer.PackSize = 1, 3<<20 // a chunk in a pack
	v.fill(1, 0, 1, 2, 66)
	id := w.backup(v, o).Snapshot
	blobs, m := w.load(id)
	pathOf := func(chunk int64) string {
		l, ok, err := blobs.Find(t.Context(), blob.Sum(v.chunks[chunk]), blob.Data)
		must(t, err)
		if !ok {
			t.Fatalf("chunk %d is not in the index", chunk)
		}
		return filepath.Join(w.folder, "data", l.Pack.String()[:2], l.Pack.String())
	}
	want := []int64{1, 66}
	must(t, os.Remove(pathOf(66)))
	b, err := os.ReadFile(pathOf(1))
	must(t, err)
	b[len(b)/2] ^= 1
	must(t, os.Remove(pathOf(1)))
	must(t, os.WriteFile(pathOf(1), b, 0o600))
	_, err = Restore(t.Context(), blobs, m, newDisk(m.Size), RestoreOptions{})
	var damage *repo.DamagedError
	if !api.Is(err, api.Corrupt) || !errors.As(err, &damage) {
		t.Errorf("%v, want an error of kind corrupt that names the blob", err)
	}
	got := newDisk(m.Size)
	damaged, err := Restore(t.Context(), blobs, m, got, RestoreOptions{AllowDamaged: true})
	must(t, err)
	for _, c := range want {
		delete(v.chunks, c)
	}
	if !slices.Equal(damaged, want) || !got.equals(v) {
		t.Errorf("chunks %v are damaged, want %v", damaged, want)
	}
}

// TestLyingManifestIsDamage: a manifest that names a blob of another size for a chunk damages this chunk alone.
func TestLyingManifestIsDamage(t *testing.T) {
	w := newWorld(t)
	blobs, err := w.r.LoadIndex(t.Context())
	must(t, err)
	writer, err := repo.NewWriter(t.Context(), blobs, repo.WriterOptions{})
	must(t, err)
	add := func(n int64) blob.ID {
		id, _, err := writer.Add(t.Context(), blob.Data, randomBytes(uint64(n), n))
		must(t, err)
		return id
	}
	builder, err := manifest.NewBuilder(writer, nil, 3*chunkSize)
	must(t, err)
	long, right := add(chunkSize+4096), add(chunkSize)
	must(t, builder.Put(t.Context(), 0, []manifest.Chunk{{Digest: long}, {Digest: right},
		{Digest: add(5), FragmentSize: 1 << 20, Fragments: []blob.ID{add(1 << 20), add(1<<20 - 1)}}}))
	root, err := builder.Finish(t.Context(), options("v").Description)
	must(t, err)
	must(t, writer.Flush(t.Context()))
	must(t, writer.Close())
	must(t, blobs.Close())
	id, err := w.r.SaveSnapshot(t.Context(), repo.Snapshot{Tree: &root, Paths: []string{"/volumes/v"}})
	must(t, err)
	blobs, m := w.load(id)
	got, want := newDisk(m.Size), newDisk(m.Size)
	damaged, err := Restore(t.Context(), blobs, m, got, RestoreOptions{AllowDamaged: true})
	must(t, err)
	want.chunks[1] = randomBytes(chunkSize, chunkSize)
	want.chunks[2] = append(randomBytes(1<<20, 1<<20), make([]byte, 1<<20)...)
	if !slices.Equal(damaged, []int64{0, 2}) || !got.equals(want) {
		t.Errorf("chunks %v are damaged, want 0 and 2; the others are right: %v", damaged, got.equals(want))
	}
}

// TestRestoreSkipsLateChunks: Restore does not read a chunk that the sink got meanwhile, and counts the chunk as
// restored.
func TestRestoreSkipsLateChunks(t *testing.T) {
	w := newWorld(t)
	v := newDisk(70 * chunkSize)
	v.fill(1, 0, 1, 2, 66)
	blobs, m := w.load(w.backup(v, options("v")).Snapshot)
	got, asked := newDisk(m.Size), map[int64]int{}
	var mu sync.Mutex
	p := &Progress{}
	_, err := Restore(t.Context(), blobs, m, got, RestoreOptions{Progress: p, Skip: func(chunk int64) bool {
		mu.Lock()
		defer mu.Unlock()
		asked[chunk]++
		return chunk == 1 && asked[chunk] == 2
	}})
	must(t, err)
	if done, total := p.Bytes(); done != total || total != m.Size {
		t.Errorf("%d of %d bytes are restored", done, total)
	}
	delete(v.chunks, 1)
	if !got.equals(v) {
		t.Error("the restore wrote other chunks than the missing ones")
	}
}

// TestDamageIsBounded: a restore lists a bounded number of damaged chunks, and fails with more.
func TestDamageIsBounded(t *testing.T) {
	d := &download{m: &manifest.Manifest{Description: manifest.Description{Size: 128 * chunkSize}},
		o: RestoreOptions{AllowDamaged: true}, damaged: map[int64]struct{}{}, limit: 64}
	lost := api.Errorf(api.NotFound, "lost")
	must(t, d.damage(0, 64, lost))
	if err := d.damage(64, 64, lost); !api.Is(err, api.Corrupt) {
		t.Errorf("the damage of a second segment: %v", err)
	}
}
