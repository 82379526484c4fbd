package restoring

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Bounds of all layers of a node together, and of the pause of a restore for reads.
const (
	cachedChunks = 16
	readsAtOnce  = 8 // chunks that readers wait for
	aheadAtOnce  = 4 // chunks that no reader waits for yet
	giveWay      = time.Second
	localAtOnce  = 4 // chunks that a restore copies from local layers
)

// Options of a Set. The zero value of a field stands for its default.
type Options struct {
	Log *slog.Logger
	// PauseMin and PauseMax bound the pause before a backup is opened again, which doubles: 1 s to 10 s.
	PauseMin, PauseMax time.Duration
	// HealPauseMax bounds the pause before a damaged chunk is asked for again, which doubles from PauseMin on: 5 min.
	HealPauseMax time.Duration
	// Stall is how long a restore tries again without progress, before it is idle: 10 min.
	Stall time.Duration
	// PlanMemory bounds the bytes that the digests of all layers take: 1 GiB, those of the largest volume.
	PlanMemory int64
	// Disks lists the disks of the node, in whose layers restores look for chunks; nil: only the layer's own disk.
	Disks func(context.Context) []block.Layers
	// Attached lists the restoring layers below attached volumes, whose digests have precedence; nil: none has.
	Attached func(context.Context) []AttachedLayer
}

// AttachedLayer is a restoring layer below an attached volume.
type AttachedLayer struct {
	Disk, UID string
	Size      int64 // of the backup, in bytes
}

// Set has the restoring layers of a node.
type Set struct {
	Options
	ctx     context.Context
	cancel  context.CancelFunc
	work    sync.WaitGroup
	reading chan struct{} // slots of readers' chunks
	ahead   chan struct{} // slots of chunks ahead

	mu      sync.Mutex
	closed  bool
	layers  map[layerKey]*Layer
	cache   []cachedChunk    // the last use comes last
	readers int              // reads that a caller waits for
	plans   map[*Layer]int64 // bytes of the layers' digests
	idle    chan struct{}    // closed when readers becomes 0
}

type layerKey struct{ disk, uid string }

type cachedChunk struct {
	layer  *Layer
	number int64
	bytes  []byte
}

// NewSet has no layer yet.
func NewSet(o Options) *Set {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.PauseMin <= 0 {
		o.PauseMin = time.Second
	}
	if o.PauseMax <= 0 {
		o.PauseMax = 10 * time.Second
	}
	if o.HealPauseMax <= 0 {
		o.HealPauseMax = 5 * time.Minute
	}
	if o.PlanMemory <= 0 {
		o.PlanMemory = planSize(api.MaxVolumeSize)
	}
	if o.Stall <= 0 {
		o.Stall = 10 * time.Minute
	}
	s := &Set{Options: o, layers: map[layerKey]*Layer{}, plans: map[*Layer]int64{}, idle: make(chan struct{}),
		reading: make(chan struct{}, readsAtOnce), ahead: make(chan struct{}, aheadAtOnce)}
	close(s.idle)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Start runs until ctx ends, and then closes all layers.
func (s *Set) Start(ctx context.Context) error {
	<-ctx.Done()
	s.mu.Lock()
	s.closed = true
	s.work.Add(1)
	all := s.layers
	s.layers = map[layerKey]*Layer{}
	s.mu.Unlock()
	for _, l := range all {
		l.stop()
	}
	s.cancel()
	s.work.Done()
	s.work.Wait()
	return nil
}

// NeedLeaderElection is false: every node has its own layers.
func (s *Set) NeedLeaderElection() bool { return false }

// begin counts work that Start waits for; false: the Set is closed. The caller calls work.Done.
func (s *Set) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.work.Add(1)
	return true
}

// run starts a goroutine of the Set; false: the Set is closed.
func (s *Set) run(f func()) bool {
	if !s.begin() {
		return false
	}
	go func() {
		defer s.work.Done()
		f()
	}()
	return true
}

// Add adds a layer of a disk, or returns the one of before. open opens the layer's backup; its context ends the use of
// the backup.
func (s *Set) Add(on block.Layers, uid string, open func(context.Context) (block.Backup, error)) *Layer {
	key := layerKey{on.UID(), uid}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.layers[key]; l != nil {
		return l
	}
	l := newLayer(s, on, uid, open)
	if !s.closed {
		s.layers[key] = l
	}
	return l
}

// Remove ends the service of a layer: the layer of the disk is finished, or is not wanted any more.
func (s *Set) Remove(disk, uid string) {
	key := layerKey{disk, uid}
	s.mu.Lock()
	l := s.layers[key]
	if l != nil {
		delete(s.layers, key)
		s.work.Add(1) // layers has none after Start's end
	}
	s.mu.Unlock()
	if l != nil {
		defer s.work.Done()
		l.end()
	}
}

// Healed makes restores ask for damaged chunks now: a node has stored lost or damaged blobs of a repository again.
func (s *Set) Healed() {
	s.mu.Lock()
	layers := slices.Collect(maps.Values(s.layers))
	s.mu.Unlock()
	for _, l := range layers {
		l.askNow()
	}
}

// reservePlan takes n bytes for the digests of a layer, or returns an error of kind busy. After a restart, layers leave
// the memory to those below attached volumes that have no digests yet.
func (s *Set) reservePlan(ctx context.Context, l *Layer, n int64) error {
	var attached []AttachedLayer
	if s.Attached != nil {
		attached = s.Attached(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	left := s.PlanMemory
	for _, taken := range s.plans {
		left -= taken
	}
	if !slices.ContainsFunc(attached, l.is) {
		for _, a := range attached {
			if !s.hasPlan(a) {
				left -= planSize(a.Size)
			}
		}
	}
	if n > left {
		return api.Errorf(api.Busy, "the digests of the chunks need %s of memory, and the restores of this node and those "+
			"of attached volumes leave %s of %s; the restore continues when others have ended", api.SizeText(n),
			api.SizeText(max(left, 0)), api.SizeText(s.PlanMemory))
	}
	s.plans[l] = n
	return nil
}

// hasPlan reports whether a layer has memory for its digests. The caller has mu.
func (s *Set) hasPlan(a AttachedLayer) bool {
	for l := range s.plans {
		if l.is(a) {
			return true
		}
	}
	return false
}

func (s *Set) releasePlan(l *Layer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.plans, l)
}

func (s *Set) find(disk, uid string) *Layer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.layers[layerKey{disk, uid}]
}

// Disk returns a disk that reads restoring layers, too.
func (s *Set) Disk(on block.Layers) block.Layers {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.layers {
		if key.disk == on.UID() {
			return &disk{Layers: on, set: s}
		}
	}
	return on
}

// cached returns a chunk of the cache, or nil.
func (s *Set) cached(l *Layer, number int64) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range s.cache {
		if c.layer == l && c.number == number {
			s.cache = append(append(s.cache[:i:i], s.cache[i+1:]...), c)
			return c.bytes
		}
	}
	return nil
}

// keep adds a chunk to the cache.
func (s *Set) keep(l *Layer, number int64, b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.cache) == cachedChunks {
		s.cache = append([]cachedChunk(nil), s.cache[1:]...)
	}
	s.cache = append(s.cache, cachedChunk{l, number, b})
}

// forget drops the chunks of a layer from the cache.
func (s *Set) forget(l *Layer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var left []cachedChunk
	for _, c := range s.cache {
		if c.layer != l {
			left = append(left, c)
		}
	}
	s.cache = left
}

// beginWait counts a reader that waits for a chunk, until the returned function is called.
func (s *Set) beginWait() (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.readers++; s.readers == 1 {
		s.idle = make(chan struct{})
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.readers--; s.readers == 0 {
			close(s.idle)
		}
	}
}

// yield waits while readers wait for chunks, for a bounded time.
func (s *Set) yield() {
	s.mu.Lock()
	idle := s.idle
	s.mu.Unlock()
	late := time.NewTimer(giveWay)
	defer late.Stop()
	select {
	case <-idle:
	case <-late.C:
	}
}

// errEnded answers a use of a layer that is not served any more.
var errEnded = api.Errorf(api.NotFound, "the layer is not being restored any more")
