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

// A copy from another node also reads from helpers: further nodes with the image and a free slot. Each chunk comes from
// the sender with the fewest requests in progress. Every sender counts against the limit of its disk. A failing helper
// is left out. The digest of the layer verifies the chunks of all senders together; after a mismatch the whole layer
// comes from the first sender alone.

const (
	maxHelpers   = 2                // beside the first sender
	slotTimeout  = 2 * time.Second  // a helper without a free slot by then is left out
	chunkTimeout = 20 * time.Second // of one chunk from a helper
)

// helperDisk is a disk of a helper.
type helperDisk struct {
	node, address string
	disk          string
}

// parallelSource reads a disk of another node with its helpers. end ends the help.
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

// sender is the disk of a helper, or the first sender.
type sender struct {
	helperDisk
	client  *wire.Client
	release func()          // of its slot
	same    map[string]bool // layers with the digest of the first sender
	busy    int
	rate    float64 // recent seconds per byte
}

// newParallelSource asks every helper for a slot, until long has passed. A helper takes part as soon as it has a slot.
func newParallelSource(ctx context.Context, first *remoteDisk, id *wire.Identity, others []helperDisk,
	long time.Duration, log *slog.Logger,
) *parallelSource {
	ctx, cancel := context.WithCancel(ctx)
	t := &parallelSource{remoteDisk: first, log: log, first: &sender{}, sent: map[string]int64{}}
	for _, o := range others {
		t.asking.Go(func() {
			c := wire.NewClient(id, o.node, o.address)
			give, err := acquireSlot(ctx, c, o.disk, long)
			if err != nil {
				c.Close()
				return // the copy continues without this helper
			}
			t.mu.Lock()
			defer t.mu.Unlock()
			t.help = append(t.help, &sender{helperDisk: o, client: c, release: give, same: map[string]bool{}})
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

// acquireSlot acquires a slot of a disk of another node, if one is free before long has passed.
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
	s.release()
	s.client.Close()
}

// selectSender returns the sender with the fewest requests in progress, and prefers the first sender.
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

// finishChunk ends a request. A failing helper is left out, and so is a helper far slower than the first sender,
// because the importer waits for the slowest chunk.
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
		err = api.Errorf(api.Unavailable, "the chunk of %d bytes took %v", n, took.Round(time.Millisecond))
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

// bytesByDisk returns how many bytes each helper sent.
func (t *parallelSource) bytesByDisk() map[string]int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	sent := map[string]int64{}
	for d, n := range t.sent {
		sent[d] = n
	}
	return sent
}

// Open opens a layer on every sender.
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

// parallelLayer is a layer on several senders; the first sender supplies the map.
type parallelLayer struct {
	block.Source
	source    *parallelSource
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

// readFrom reads a chunk from a helper, after a comparison of the digests.
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
			return api.Errorf(api.Corrupt, "layer %s on disk %s differs from disk %s", l.uid, s.disk, l.source.uid)
		}
		l.source.mu.Lock()
		s.same[l.uid] = true
		l.source.mu.Unlock()
	}
	return s.client.Read(ctx, s.disk, l.uid, p, off)
}

// findHelpers returns disks with the image on other nodes than this node and the first sender, one disk per node.
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

// copyParallel is importer.Copy from a disk of another node and from helpers.
func (n *copyReconciler) copyParallel(ctx context.Context, first *remoteDisk, c *api.ImageCopy, on block.Layers,
	spec importer.Spec, p *importer.Progress,
) (importer.Result, error) {
	others := n.findHelpers(ctx, c)
	if len(others) == 0 {
		return importer.Copy(ctx, first, on, spec, p)
	}
	t := newParallelSource(ctx, first, n.opts.Identity, others, slotTimeout, n.log)
	got, err := importer.Copy(ctx, t, on, spec, p)
	t.end()
	if sent := t.bytesByDisk(); len(sent) > 0 {
		n.log.Info("a copy came from several nodes", "image", c.Spec.Image, "disk", c.Spec.Disk, "first", c.Spec.From,
			"others", sent, "err", err)
		if api.Is(err, api.Corrupt) { // any sender may have sent the wrong bytes
			return importer.Copy(ctx, first, on, spec, p)
		}
	}
	return got, err
}
