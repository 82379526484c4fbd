package host

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/wire"
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/replicas/stack"
)

// lending is a disk of another node. read, if set, gets the bytes of each read, and may spoil the bytes or fail.
type lending struct {
	block.Layers
	read func(p []byte) error
}

func (l lending) Open(uid string) (block.Source, error) {
	src, err := l.Layers.Open(uid)
	return lentSource{src, l.read}, err
}

type lentSource struct {
	block.Source
	read func([]byte) error
}

func (s lentSource) ReadAt(p []byte, off int64) (int, error) {
	n, err := s.Source.ReadAt(p, off)
	if s.read != nil && err == nil {
		if err = s.read(p); err != nil {
			n = 0
		}
	}
	return n, err
}

// senders are nodes with a disk and the same image each, and a node with the receiving disk.
type senders struct {
	t       *testing.T
	id      *wire.Identity
	others  []helperDisk  // the first is asked first
	left    chan struct{} // a place was returned
	want    importer.Spec
	content []byte
	to      *stack.Disk
}

func newSenders(t *testing.T, reads ...func([]byte) error) *senders {
	t.Helper()
	b, err := wire.NewAuthority()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ok(err)
	authority, err := wire.LoadAuthority(b)
	ok(err)
	identity := func(node string) *wire.Identity {
		id, err := wire.OpenIdentity(t.TempDir(), node)
		ok(err)
		req, err := id.Request()
		ok(err)
		cert, _, err := authority.Sign(req, node, wire.CertificateLife)
		ok(err)
		ok(id.Put(cert, authority.PEM()))
		return id
	}
	newDisk := func() *stack.Disk {
		d, err := stack.Add(t.Context(), t.TempDir())
		ok(err)
		t.Cleanup(func() { _ = d.Close() })
		return d
	}
	s := &senders{t: t, id: identity("receiver"), content: make([]byte, 16*block.ChunkSize), to: newDisk(),
		left: make(chan struct{}, 16)}
	rnd := rand.New(rand.NewPCG(1, 1))
	for i := range s.content {
		s.content[i] = byte(rnd.Uint32())
	}
	s.want = importer.Spec{UID: api.NewUID(), Name: "golden", Layers: []api.UID{api.NewUID()}}
	ctx, stop := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	t.Cleanup(func() { stop(); serving.Wait() })
	for i, read := range reads {
		d := newDisk()
		w, err := d.Create(t.Context(), string(s.want.Layers[0]), int64(len(s.content)))
		ok(err)
		_, err = w.WriteAt(s.content, 0)
		ok(err)
		root, _, err := w.Seal(t.Context())
		ok(err)
		ok(d.PutImage(block.Image{UID: string(s.want.UID), Name: s.want.Name, Layers: []string{string(s.want.Layers[0])},
			Format: "raw", VirtualSize: int64(len(s.content)), Checksum: "none", Digest: root}))
		name := "node-" + string(rune('a'+i))
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		ok(err)
		server := wire.NewServer(wire.ServerOptions{Identity: identity(name), Log: slog.New(slog.DiscardHandler),
			Disk: func(string) (block.Layers, error) { return lending{d, read}, nil },
			Send: func(context.Context, string) (func(), error) { return func() { s.left <- struct{}{} }, nil },
			Kind: func(err error) string { return api.KindOf(err).String() }})
		serving.Go(func() {
			if err := server.Serve(ctx, ln); err != nil {
				t.Error(err)
			}
		})
		s.others = append(s.others, helperDisk{name, ln.Addr().String(), d.UID()})
	}
	return s
}

// copy copies the image from the first sender, helped by the others, which have places before the start.
func (s *senders) copy() (map[string]int64, error) {
	c := wire.NewClient(s.id, s.others[0].node, s.others[0].address)
	defer c.Close()
	t := newParallelSource(s.t.Context(), &remoteDisk{s.t.Context(), c, s.others[0].disk}, s.id, s.others[1:],
		time.Minute, slog.New(slog.DiscardHandler))
	t.asking.Wait()
	_, err := importer.Copy(s.t.Context(), t, s.to, s.want, &importer.Progress{})
	t.end()
	return t.bytesByDisk(), err
}

func (s *senders) holds() {
	s.t.Helper()
	src, err := s.to.Open(string(s.want.Layers[0]))
	if err != nil {
		s.t.Fatal(err)
	}
	defer src.Close()
	got := make([]byte, len(s.content))
	if _, err := src.ReadAt(got, 0); err != nil || !bytes.Equal(got, s.content) {
		s.t.Errorf("the copy is another one than the image: %v", err)
	}
}

// TestSeveralSenders: a copy comes from several nodes at once; a failing node is left out.
func TestSeveralSenders(t *testing.T) {
	failed, helped := make(chan struct{}), make(chan struct{})
	var fail, help sync.Once
	s := newSenders(t,
		func([]byte) error { <-helped; return nil }, // a helper sends bytes first
		func([]byte) error { <-failed; help.Do(func() { close(helped) }); return nil },
		func([]byte) error { fail.Do(func() { close(failed) }); return errors.New("its disk is broken") })
	sent, err := s.copy()
	if err != nil {
		t.Fatal(err)
	}
	s.holds()
	if sent[s.others[1].disk] == 0 || sent[s.others[2].disk] != 0 {
		t.Errorf("the helpers sent %v", sent)
	}
}

// TestWrongSender: wrong bytes from a helper are not taken for the image.
func TestWrongSender(t *testing.T) {
	helped := make(chan struct{})
	var help sync.Once
	s := newSenders(t,
		func([]byte) error { <-helped; return nil },
		func(p []byte) error { p[len(p)/2] ^= 1; help.Do(func() { close(helped) }); return nil })
	sent, err := s.copy()
	if !api.Is(err, api.Corrupt) || sent[s.others[1].disk] == 0 {
		t.Fatalf("a copy with wrong bytes: %v, %v", sent, err)
	}
	if _, err := s.to.Open(string(s.want.Layers[0])); err == nil {
		t.Error("there is a layer")
	}
	s.others = s.others[:1]
	if _, err := s.copy(); err != nil {
		t.Fatal(err)
	}
	s.holds()
}

// TestPlacesOfHelpers: a copy returns the places of the helpers at the end.
func TestPlacesOfHelpers(t *testing.T) {
	s := newSenders(t, nil, nil, nil)
	if _, err := s.copy(); err != nil {
		t.Fatal(err)
	}
	s.holds()
	for range s.others[1:] { // the sender notices the closed connection
		<-s.left
	}
}
