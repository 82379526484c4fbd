package host

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/wire"
	"drover.io/drover/imagestore/importer"
)

// A copy that comes from another node is read from further nodes that have the image too, where they have a place free:
// each piece from the one that has least to do. All of them count against the bounds of their disks. One that fails is
// left out; what came from them is verified as a whole, by the digest of the layer, and comes from the first alone
// where that does not match.

const (
	maxHelpers = 2                // beside the first
	slotTimeout   = 2 * time.Second  // a place that is not free by then is for others
	chunkTimeout    = 20 * time.Second // for one piece
)

// helperDisk is a disk of a further node.
type helperDisk struct {
	node, address string
	disk          string
}

// parallelSource is a disk of another node, and those that help it. end ends it.
type parallelSource struct {
	*remoteDisk
	log    *slog.Logger
	asking sync.WaitGroup
	end    func()

	mu    sync.Mutex
	first *sender
	help  []*sender
	sent  map[string]int64 // by disk of a helper
}

// sender is one that sends.
type sender struct {
	helperDisk
	client *wire.Client
	give   func()          // its place
	same   map[string]bool // layers that are known to be those of the first
	busy   int
	rate   float64 // seconds for a byte, of late
}

// newParallelSource asks helpers for a place, for so long, each of which takes part as soon as it has one.
func newParallelSource(ctx context.Context, first *remoteDisk, id *wire.Identity, others []helperDisk, long time.Duration,
	log *slog.Logger) *parallelSource {
	ctx, cancel := context.WithCancel(ctx)
	t := &parallelSource{remoteDisk: first, log: log, first: &sender{}, sent: map[string]int64{}}
	for _, o := range others {
		t.asking.Go(func() {
			c := wire.NewClient(id, o.node, o.address)
			give, err := acquireSlot(ctx, c, o.disk, long)
			if err != nil {
				c.Close()
				return // the others do without it
			}
			t.mu.Lock()
			defer t.mu.Unlock()
			t.help = append(t.help, &sender{helperDisk: o, client: c, give: give, same: map[string]bool{}})
		})
	}
	t.end = func() {
		cancel()
		t.asking.Wait()
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, s := range t.help {
			s.close()
		}
		t.help = nil
	}
	return t
}

// acquireSlot takes a place among those that a disk serves, if one is free within a time.
func acquireSlot(ctx context.Context, c *wire.Client, disk string, long time.Duration) (give func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	late := time.AfterFunc(long, cancel)
	end, err := c.Send(ctx, disk)
	if err == nil && !late.Stop() {
		end()
		err = context.DeadlineExceeded
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return func() { end(); cancel() }, nil
}

func (s *sender) close() {
	s.give()
	s.client.Close()
}

// selectSender is who has least to do, the first before others.
func (t *parallelSource) selectSender() *sender {
	t.mu.Lock()
	defer t.mu.Unlock()
	least := t.first
	for _, s := range t.help {
		if s.busy < least.busy {
			least = s
		}
	}
	least.busy++
	return least
}

// setReady ends a piece; with an error, the help of who had it. One that is far slower than the first is no help either:
// what comes next waits for the last piece of a stretch.
func (t *parallelSource) finishChunk(s *sender, n int, began time.Time, err error) {
	took := time.Since(began)
	t.mu.Lock()
	defer t.mu.Unlock()
	s.busy--
	if s == t.first {
		if rate := took.Seconds() / float64(max(n, 1)); s.rate == 0 {
			s.rate = rate
		} else {
			s.rate += (rate - s.rate) / 8
		}
		return
	}
	if err == nil {
		t.sent[s.disk] += int64(n)
		if fair := t.first.rate * float64(n); fair == 0 || took.Seconds() < 4*fair+1 {
			return
		}
		err = api.Errorf(api.Unavailable, "it took %v for %d bytes", took.Round(time.Millisecond), n)
	}
	for i := range t.help {
		if t.help[i] == s {
			t.help = append(t.help[:i:i], t.help[i+1:]...)
			t.log.Warn("a node that helped with a copy is left out", "node", s.node, "disk", s.disk, "err", err)
			s.close()
			return
		}
	}
}

// bytesByDisk is how much came from each helper's disk.
func (t *parallelSource) bytesByDisk() map[string]int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	sent := map[string]int64{}
	for d, n := range t.sent {
		sent[d] = n
	}
	return sent
}

// Open opens a layer that is read from all of them.
func (t *parallelSource) Open(uid string) (block.Source, error) {
	root, _, err := t.Digest(uid)
	if err != nil {
		return nil, err
	}
	src, err := t.remoteDisk.Open(uid)
	if err != nil {
		return nil, err
	}
	return &parallelLayer{Source: src, source: t, uid: uid, root: root}, nil
}

// parallelLayer is a layer that a team has; its map is the first's.
type parallelLayer struct {
	block.Source
	source         *parallelSource
	uid, root string
}

// ReadAt implements io.ReaderAt.
func (l *parallelLayer) ReadAt(p []byte, off int64) (int, error) {
	if len(p) > block.ChunkSize || off+int64(len(p)) > l.Size() {
		return l.Source.ReadAt(p, off)
	}
	for {
		s, began := l.source.selectSender(), time.Now()
		if s == l.source.first {
			n, err := l.Source.ReadAt(p, off)
			l.source.finishChunk(s, n, began, err)
			return n, err
		}
		err := l.readFrom(s, p, off)
		l.source.finishChunk(s, len(p), began, err)
		if err == nil {
			return len(p), nil
		}
	}
}

// readFrom reads a piece from a helper, once it is known to have the same layer.
func (l *parallelLayer) readFrom(s *sender, p []byte, off int64) error {
	ctx, cancel := context.WithTimeout(l.source.ctx, chunkTimeout)
	defer cancel()
	l.source.mu.Lock()
	same := s.same[l.uid]
	l.source.mu.Unlock()
	if !same {
		root, _, err := s.client.Digest(ctx, s.disk, l.uid)
		if err != nil {
			return err
		}
		if root != l.root {
			return api.Errorf(api.Corrupt, "layer %s on disk %s is another one than that on disk %s", l.uid, s.disk, l.source.uid)
		}
		l.source.mu.Lock()
		s.same[l.uid] = true
		l.source.mu.Unlock()
	}
	return s.client.Read(ctx, s.disk, l.uid, p, off)
}

// findHelpers are disks of nodes other than this one and the sender's that have an image, one of each node.
func (n *copyReconciler) findHelpers(ctx context.Context, c *api.ImageCopy) []helperDisk {
	from, _, err := n.locateDisk(ctx, c.Spec.From)
	if err != nil {
		return nil
	}
	var list api.ImageCopyList
	of := client.MatchingLabels{api.LabelImage: api.LabelValue(c.Spec.Image)}
	if n.List(ctx, &list, of, client.UnsafeDisableDeepCopy) != nil {
		return nil
	}
	taken := map[string]bool{n.node: true, from: true}
	var found []helperDisk
	for _, i := range rand.Perm(len(list.Items)) {
		o := &list.Items[i]
		if o.Spec.UUID != c.Spec.UUID || o.Status.State != api.ImageReady || o.DeletionTimestamp != nil ||
			taken[o.Spec.Node] || len(found) == maxHelpers {
			continue
		}
		node, address, err := n.locateDisk(ctx, o.Spec.Disk)
		if err == nil && address != "" && node == o.Spec.Node {
			taken[node] = true
			found = append(found, helperDisk{node, address, string(o.Spec.Disk)})
		}
	}
	return found
}

// copyParallel is importer.Copy from a disk of another node and those that help it.
func (n *copyReconciler) copyParallel(ctx context.Context, first *remoteDisk, c *api.ImageCopy, on block.Layers, want importer.Spec,
	p *importer.Progress) (importer.Result, error) {
	others := n.findHelpers(ctx, c)
	if len(others) == 0 {
		return importer.Copy(ctx, first, on, want, p)
	}
	t := newParallelSource(ctx, first, n.opts.Identity, others, slotTimeout, n.log)
	got, err := importer.Copy(ctx, t, on, want, p)
	t.end()
	if sent := t.bytesByDisk(); len(sent) > 0 {
		n.log.Info("a copy came from several nodes", "image", c.Spec.Image, "disk", c.Spec.Disk, "first", c.Spec.From,
			"others", sent, "err", err)
		if api.Is(err, api.Corrupt) { // whose fault that is nobody knows
			return importer.Copy(ctx, first, on, want, p)
		}
	}
	return got, err
}
