// Package sources reads chunks of layers from other disks of the node and from other nodes, for a disk without these
// layers. A failing or silent source gives way to the next.
//
// Sources owns the connections to other nodes, a goroutine for each read in progress, and one for each disk that is
// being opened: all reads of a disk share the open. A read of a hanging disk outlives its caller; Close waits a while
// for all reads. No I/O runs under the lock.
package sources

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/stack"
)

// Source is a disk with layers, of this or of another node.
type Source struct {
	Node    string  `json:"node"` // empty: this node
	Address string  `json:"address"`
	Disk    api.UID `json:"disk"`
	Path    string  `json:"-"` // of a disk of this node
}

// readTime bounds the read of a chunk. After silentTime without an answer Sources asks the next source as well. A
// failing or silent source is the last in the order for shunTime.
const (
	readTime   = 10 * time.Second
	silentTime = time.Second
	shunTime   = 30 * time.Second
)

// Sources reads layers. The caller sets the exported fields before the first read.
type Sources struct {
	Identity *wire.Identity                                           // of this node; nil: no other node is asked
	Disk     func(ctx context.Context, s Source) (*stack.Disk, error) // finds a disk of this node

	mu      sync.Mutex
	clients map[Source]*wire.Client // by node and address
	bad     map[Source]time.Time    // the last failure
	opens   map[Source]*opening     // disks of this node that are being opened
	reads   sync.WaitGroup
}

// opening is a disk that is being opened. disk and err are set before done is closed.
type opening struct {
	done chan struct{}
	disk *stack.Disk
	err  error
}

// disk finds a disk of this node. The open of a disk that hangs continues without the caller, and serves later ones.
func (s *Sources) disk(ctx context.Context, of Source) (*stack.Disk, error) {
	s.mu.Lock()
	o := s.opens[of]
	if o == nil {
		o = &opening{done: make(chan struct{})}
		if s.opens == nil {
			s.opens = map[Source]*opening{}
		}
		s.opens[of] = o
		s.reads.Go(func() {
			o.disk, o.err = s.Disk(context.WithoutCancel(ctx), of)
			s.mu.Lock()
			delete(s.opens, of)
			s.mu.Unlock()
			close(o.done)
		})
	}
	s.mu.Unlock()
	select {
	case <-o.done:
		return o.disk, o.err
	case <-ctx.Done():
		return nil, api.Errorf(api.Unavailable, "disk %s does not answer: %w", of.Path, ctx.Err())
	}
}

// Client is the connection to the node of a source.
func (s *Sources) Client(of Source) *wire.Client {
	of.Disk = ""
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clients == nil {
		s.clients = map[Source]*wire.Client{}
	}
	if s.clients[of] == nil {
		s.clients[of] = wire.NewClient(s.Identity, of.Node, of.Address)
	}
	return s.clients[of]
}

// Close ends the connections and waits for reads, for readTime at most, because a read of a hanging disk never ends.
func (s *Sources) Close() error {
	s.mu.Lock()
	for _, c := range s.clients {
		c.Close()
	}
	s.clients = nil
	s.mu.Unlock()
	ended := make(chan struct{})
	go func() { // ends with the reads
		defer close(ended)
		s.reads.Wait()
	}()
	late := time.NewTimer(readTime)
	defer late.Stop()
	select {
	case <-ended:
		return nil
	case <-late.C:
		return api.Errorf(api.Unavailable, "reads of layers are left as they are: a disk does not answer")
	}
}

// Failed makes a source the last in the order for shunTime.
func (s *Sources) Failed(source Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bad == nil {
		s.bad = map[Source]time.Time{}
	}
	s.bad[source] = time.Now()
}

// Order moves sources with a recent failure to the end of the list.
func (s *Sources) Order(list []Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for source, at := range s.bad {
		if time.Since(at) > shunTime {
			delete(s.bad, source)
		}
	}
	slices.SortStableFunc(list, func(a, b Source) int { return s.bad[a].Compare(s.bad[b]) })
}

// Fetch reads a part of a layer from the first source whose bytes check accepts.
func (s *Sources) Fetch(ctx context.Context, list []Source, uid string, off int64, buf []byte,
	check func([]byte) error) error {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	s.Order(list)
	got, err := s.first(ctx, len(list), silentTime, func(i int) ([]byte, error) {
		late := time.AfterFunc(silentTime, func() { s.Failed(list[i]) })
		defer late.Stop()
		b, err := s.read(ctx, list[i], uid, off, len(buf))
		if err == nil {
			err = check(b)
		}
		if err != nil && !errors.Is(err, context.Canceled) && !api.Is(err, api.NotFound) {
			s.Failed(list[i])
		}
		return b, err
	})
	if err != nil {
		return api.Errorf(api.Unavailable, "layer %s: %w", uid, err)
	}
	copy(buf, got)
	return nil
}

func (s *Sources) read(ctx context.Context, from Source, uid string, off int64, n int) ([]byte, error) {
	if from.Node != "" {
		b := make([]byte, n)
		return b, s.Client(from).Read(ctx, string(from.Disk), uid, b, off)
	}
	disk, err := s.disk(ctx, from)
	if err != nil {
		return nil, err
	}
	return disk.ReadLayer(ctx, uid, off, n)
}

// first returns the first answer of n sources. It asks the next source after a failure, and after silent without an
// answer. The error leaves sources without the layer out.
func (s *Sources) first(ctx context.Context, n int, silent time.Duration, read func(i int) ([]byte, error)) (
	[]byte, error) {
	type answer struct {
		b   []byte
		err error
	}
	answers, next := make(chan answer, n), 0
	late := time.NewTimer(silent)
	defer late.Stop()
	ask := func() {
		if next == n {
			return
		}
		i := next
		next++
		late.Reset(silent)
		s.reads.Go(func() {
			b, err := read(i)
			answers <- answer{b, err}
		})
	}
	var errs []error
	ask()
	for ended := 0; ended < n; {
		select {
		case a := <-answers:
			if a.err == nil {
				return a.b, nil
			}
			if ended++; !api.Is(a.err, api.NotFound) {
				errs = append(errs, a.err)
			}
			ask()
		case <-late.C:
			ask()
		case <-ctx.Done():
			return nil, errors.Join(append(errs, api.Errorf(api.Unavailable,
				"a source of the layer does not answer: %w", ctx.Err()))...)
		}
	}
	if len(errs) == 0 {
		return nil, api.Errorf(api.NotFound, "no disk of this node and no other node has the layer")
	}
	return nil, errors.Join(errs...)
}
