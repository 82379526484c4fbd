package repo

import (
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/tree"
	"drover.io/drover/block/suite"
)

// saveFolder saves a snapshot of a folder with a file.
func saveFolder(t testing.TB, r *Repository, name, body string) Snapshot {
	t.Helper()
	b := loadIndex(t, r)
	w := newWriter(t, b, WriterOptions{})
	id, _, err := w.Add(t.Context(), blob.Data, []byte(body))
	must(t, err)
	root, err := w.AddTree(t.Context(), []tree.Node{{Name: name, Type: tree.File, Size: int64(len(body)),
		Content: []blob.ID{id}}})
	must(t, err)
	must(t, w.Flush(t.Context()))
	must(t, w.Close())
	s := Snapshot{Time: time.Unix(1_700_000_000, 0).UTC(), Tree: &root, Paths: []string{"/" + name}, Hostname: "cluster",
		Username: "drover", Tags: []string{"drover", "kind=volume"}, Program: "drover 1"}
	s.ID, err = r.SaveSnapshot(t.Context(), s)
	must(t, err)
	return s
}

// TestSnapshotsAreListedAndRead: each saved snapshot is listed and found, and read as saved, until its deletion.
func TestSnapshotsAreListedAndRead(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	want := map[blob.ID]Snapshot{}
	for _, name := range []string{"a", "b", "c"} {
		s := saveFolder(t, r, name, "body of "+name)
		want[s.ID] = s
	}
	read := func() map[blob.ID]Snapshot {
		got := map[blob.ID]Snapshot{}
		files, err := r.ListSnapshots(t.Context())
		must(t, err)
		for _, f := range files {
			s, err := r.LoadSnapshot(t.Context(), f)
			must(t, err)
			got[f.ID] = s
		}
		return got
	}
	if got := read(); !reflect.DeepEqual(got, want) {
		t.Errorf("read %+v, want %+v", got, want)
	}
	for id := range want {
		f, err := r.FindSnapshot(t.Context(), id)
		must(t, err)
		must(t, r.DeleteSnapshots(t.Context(), id))
		must(t, r.DeleteSnapshots(t.Context(), id))
		if _, err := r.FindSnapshot(t.Context(), id); !api.Is(err, api.NotFound) {
			t.Errorf("after the deletion: %v, want an error of kind not found", err)
		}
		if _, err := openRepository(t, store).LoadSnapshot(t.Context(), f); !api.Is(err, api.NotFound) {
			t.Errorf("after the deletion: %v, want an error of kind not found", err)
		}
		if delete(want, id); !reflect.DeepEqual(read(), want) {
			t.Error("the deletion of a snapshot changes others")
		}
	}
}

// TestDamagedSnapshotIsRefused: changed bytes, and JSON without a tree, are errors of kind corrupt that name the
// snapshot. A snapshot without tree or paths is not saved.
func TestDamagedSnapshotIsRefused(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	saveFolder(t, r, "a", "body")
	id, err := r.saveFile(t.Context(), snapshotsFolder, []byte(`{"paths":["/a"]}`))
	must(t, err)
	for _, name := range store.names(snapshotsFolder) {
		if !strings.HasSuffix(name, id.String()) {
			store.change(name, func(b []byte) []byte { b[30] ^= 1; return b })
		}
	}
	files, err := r.ListSnapshots(t.Context())
	must(t, err)
	for _, f := range files {
		_, err := r.LoadSnapshot(t.Context(), f)
		if !api.Is(err, api.Corrupt) || !strings.Contains(err.Error(), "snapshot "+f.ID.String()[:8]) {
			t.Errorf("%v, want an error of kind corrupt that names the snapshot", err)
		}
	}
	if len(files) != 2 {
		t.Errorf("%d snapshots are listed, want 2", len(files))
	}
	for _, s := range []Snapshot{{Paths: []string{"/a"}}, {Tree: &id}} {
		if _, err := r.SaveSnapshot(t.Context(), s); !api.Is(err, api.Invalid) {
			t.Errorf("%+v: %v, want an error of kind invalid", s, err)
		}
	}
}

// TestWeReadResticsSnapshots: a snapshot of restic is listed, and its folders are read down to the file.
func TestWeReadResticsSnapshots(t *testing.T) {
	suite.System(t)
	folder, files := t.TempDir(), t.TempDir()
	must(t, os.WriteFile(files+"/a file", []byte("body"), 0o600))
	mustRestic(t, folder, "init", "--repository-version", "2")
	mustRestic(t, folder, "backup", "--tag", "mine", "--host", "laptop", files)
	store := newMemoryStore()
	store.load(t, folder)
	r, err := Open(t.Context(), store, password, Options{Cache: t.TempDir()})
	must(t, err)
	list, err := r.ListSnapshots(t.Context())
	must(t, err)
	s, err := r.LoadSnapshot(t.Context(), list[0])
	must(t, err)
	if !slices.Equal(s.Paths, []string{files}) || s.Hostname != "laptop" || !slices.Equal(s.Tags, []string{"mine"}) {
		t.Errorf("the snapshot is %+v", s)
	}
	b := loadIndex(t, r)
	id := *s.Tree
	for _, name := range append(strings.Split(files, "/")[1:], "a file") {
		nodes, err := b.ReadTree(t.Context(), id)
		must(t, err)
		if len(nodes) != 1 || nodes[0].Name != name {
			t.Fatalf("the folder has %+v, want %s alone", nodes, name)
		}
		if id = nodes[0].Subtree; nodes[0].Type == tree.File {
			plain, err := b.Read(t.Context(), nodes[0].Content[0], blob.Data, nil)
			if err != nil || string(plain) != "body" {
				t.Errorf("the file has %q: %v", plain, err)
			}
		}
	}
}
