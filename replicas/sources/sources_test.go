package sources

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A chunk is read from the next source after a failure, and beside a hanging source, which is left alone.
func TestNextSourceIsAsked(t *testing.T) {
	t.Parallel()
	var s Sources
	goes := make(chan struct{})
	for name, first := range map[string]func() error{
		"a failing source":           func() error { return errors.New("damaged there") },
		"a source without the layer": func() error { return api.Errorf(api.NotFound, "none") },
		"a hanging source":           func() error { <-goes; return errors.New("late") },
	} {
		got, err := s.first(t.Context(), 2, time.Millisecond, func(i int) ([]byte, error) {
			if i == 0 {
				return nil, first()
			}
			return []byte("good"), nil
		})
		if err != nil || string(got) != "good" {
			t.Errorf("beside %s: %q, %v", name, got, err)
		}
	}
	broken := errors.New("broken")
	_, err := s.first(t.Context(), 3, time.Hour, func(int) ([]byte, error) { return nil, broken })
	if !errors.Is(err, broken) {
		t.Errorf("all sources are broken: %v", err)
	}
	if _, err := s.first(t.Context(), 0, time.Hour, nil); !api.Is(err, api.NotFound) {
		t.Errorf("there is no source: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err = s.first(ctx, 1, time.Hour, func(int) ([]byte, error) { <-goes; return nil, nil })
	if !api.Is(err, api.Unavailable) {
		t.Errorf("the only source hangs: %v", err)
	}
	close(goes)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// A source with a recent failure is asked last; otherwise disks of this node come first.
func TestOrderOfSources(t *testing.T) {
	t.Parallel()
	var s Sources
	here, other := Source{Disk: "a", Path: "/a"}, Source{Disk: "b", Path: "/b"}
	far := Source{Node: "two", Address: "192.0.2.2:7001", Disk: "c"}
	order := func(want ...Source) {
		t.Helper()
		list := []Source{here, other, far}
		s.Order(list)
		for i := range want {
			if list[i] != want[i] {
				t.Errorf("the sources are asked in the order %v, not %v", list, want)
				return
			}
		}
	}
	order(here, other, far)
	s.Failed(here)
	order(other, far, here)
	s.bad[here] = s.bad[here].Add(-shunTime - time.Second)
	order(here, other, far)
}

// Fetch takes no bytes that check refuses: another disk with the layer is read.
func TestFetchTakesWhatIsRight(t *testing.T) {
	t.Parallel()
	const size = 2 << 20
	disks, content, uid := map[api.UID]*stack.Disk{}, map[api.UID][]byte{}, string(api.NewUID())
	var list []Source
	for i := range 3 {
		dir := t.TempDir()
		d, err := stack.Add(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		on := api.UID(d.UID())
		disks[on] = d
		list = append(list, Source{Disk: on, Path: dir})
		if i == 0 {
			continue // without the layer
		}
		content[on] = bytes.Repeat([]byte{byte(i)}, size)
		w, err := d.Create(t.Context(), uid, size)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.WriteAt(content[on], 0); err != nil {
			t.Fatal(err)
		}
		if _, _, err := w.Seal(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	s := Sources{Disk: func(_ context.Context, s Source) (*stack.Disk, error) { return disks[s.Disk], nil }}
	right := content[list[2].Disk]
	check := func(b []byte) error {
		if !bytes.Equal(b, right) {
			return api.Errorf(api.Corrupt, "another content")
		}
		return nil
	}
	wrong, last := list[1], list[2]
	got := make([]byte, size)
	if err := s.Fetch(t.Context(), list, uid, 0, got, check); err != nil || !bytes.Equal(got, right) {
		t.Errorf("the right content: %v", err)
	}
	if s.Order(list); list[2] != wrong {
		t.Error("the disk with another content is not asked last")
	}
	if err := os.RemoveAll(last.Path + "/layers"); err != nil {
		t.Fatal(err)
	}
	if err := s.Fetch(t.Context(), list, uid, 0, got, check); !api.Is(err, api.Unavailable) {
		t.Errorf("no disk has the right content: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestReadsOfADiskThatHangsShareItsOpen: a disk that hangs, and is not open yet, has one open in progress, however many
// reads gave it up.
func TestReadsOfADiskThatHangsShareItsOpen(t *testing.T) {
	t.Parallel()
	answers, entered := make(chan struct{}), make(chan struct{}, 8)
	var s Sources
	s.Disk = func(context.Context, Source) (*stack.Disk, error) {
		entered <- struct{}{}
		<-answers
		return nil, api.Errorf(api.NotFound, "disk a has no layer")
	}
	hung := Source{Disk: "a", Path: "/a"}
	for range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, err := s.read(ctx, hung, "layer", 0, 1)
			ended <- err
		}()
		if len(entered) == 0 {
			entered <- <-entered // the first read waits for the disk
		}
		cancel()
		select {
		case err := <-ended:
			if !api.Is(err, api.Unavailable) {
				t.Errorf("a read of a disk that hangs: %v", err)
			}
		case <-time.After(time.Minute):
			t.Fatal("a read waits for a disk that hangs")
		}
	}
	if n := len(entered); n != 1 {
		t.Errorf("the disk is opened %d times at once", n)
	}
	close(answers)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
