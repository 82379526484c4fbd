package restoring

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Layer is a layer that a restore makes of a backup.
type Layer struct {
	set    *Set
	on     block.Layers
	uid    string
	open   func(context.Context) (block.Backup, error)
	ctx    context.Context // ends with the service of the layer
	cancel context.CancelFunc

	filling sync.RWMutex // held for reading over reads of part and writes of readers' chunks to sink
	part    io.ReaderAt  // the layer in the making; nil: none
	sink    *fillSink    // of part, for readers' chunks; nil: it takes none
	filled  filledChunks // of part

	mu        sync.Mutex
	ended     bool
	continues bool // in the next process
	whole     bool // the restore has written all chunks
	plan      *plan
	unplanned error // why there is no plan; nil: the reason is no news
	current   *openBackup
	opening   chan struct{} // closed when the attempt to open ends; nil: no attempt
	failure   error         // of the last attempt to open or read; nil after a success
	again     time.Time     // earliest next attempt
	pause     time.Duration // after the last failure
	renew     time.Time     // when current is opened again: the store may have healed damage; zero: it found none
	heal      time.Duration // the pause before renew
	waits     chan struct{} // closed and replaced when a wait for renew ends early
	idle      error         // why the restore waits for the store; nil: it does not
	reads     map[int64]*read
	recent    []int64         // the last chunks that readers asked for
	damaged   map[int64]error // of readers
	checksum  string          // of the backup
}

func newLayer(s *Set, on block.Layers, uid string, open func(context.Context) (block.Backup, error)) *Layer {
	l := &Layer{set: s, on: on, uid: uid, open: open, waits: make(chan struct{}), reads: map[int64]*read{},
		damaged: map[int64]error{}}
	l.ctx, l.cancel = context.WithCancel(s.ctx)
	return l
}

// is reports whether the layer is below an attached volume.
func (l *Layer) is(a AttachedLayer) bool { return a.UID == l.uid && a.Disk == l.on.UID() }

// openBackup is an open backup with its users. Layer.mu guards the fields.
type openBackup struct {
	block.Backup
	users   int
	dropped bool // closed after the last use
	leave   bool // in place of closed: it is opened again
}

// Prepare opens the backup in the background, again and again until this succeeds: for a layer whose restore does not
// run. A repeated call does nothing.
func (l *Layer) Prepare() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.plan != nil || l.opening != nil || l.ended {
		return
	}
	l.set.run(func() {
		for l.ctx.Err() == nil {
			o, err := l.use(l.ctx, false)
			if err == nil {
				l.release(o, nil)
				return
			}
			l.awaitAgain(l.ctx)
		}
	})
}

// Open opens the backup, and reports whether the layer can be read before the restore has finished. Open waits, and the
// layer is idle, while the backup cannot be opened.
func (l *Layer) Open(ctx context.Context) (root string, size int64, readable bool, err error) {
	o, err := l.use(ctx, false)
	for err != nil && ctx.Err() == nil && mayPass(err) {
		l.setIdle(err)
		l.awaitAgain(ctx)
		o, err = l.use(ctx, false)
	}
	if err != nil {
		return "", 0, false, cmp.Or(context.Cause(ctx), err)
	}
	defer l.release(o, nil)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idle = nil
	if l.plan == nil {
		return "", o.Size(), false, nil
	}
	return l.plan.root, o.Size(), true, nil
}

// File reports whether the backup is a block.FileBackup, and the SHA-512 of the file.
func (l *Layer) File(ctx context.Context) (checksum string, is bool, err error) {
	o, err := l.use(ctx, false)
	if err != nil {
		return "", false, err
	}
	defer l.release(o, nil)
	_, is = o.Backup.(block.FileBackup)
	return o.Checksum(), is, nil
}

// mayPass reports whether a restore may continue after an error: the store comes back, or a person corrects the target.
func mayPass(err error) bool {
	switch api.KindOf(err) {
	case api.Corrupt, api.Unsupported, api.OutOfRange:
		return false
	}
	return !errors.Is(err, errEnded)
}

// use returns the open backup, which the caller gives back by release. A backup with damage is opened again now and
// then: a caller that wants the renewed one waits for it, and others use the former one meanwhile.
func (l *Layer) use(ctx context.Context, renewed bool) (*openBackup, error) {
	for {
		l.mu.Lock()
		renews := l.current != nil && !l.renew.IsZero() && !time.Now().Before(l.renew)
		switch {
		case l.ended:
			l.mu.Unlock()
			return nil, errEnded
		case l.current == nil && l.opening == nil && time.Now().Before(l.again):
			defer l.mu.Unlock()
			return nil, l.failure
		}
		if l.opening == nil && (renews || l.current == nil) {
			l.opening = make(chan struct{})
			if !l.set.run(l.openOnce) { // the Set's lock comes after mu
				l.opening, l.ended = nil, true
				l.mu.Unlock()
				return nil, errEnded
			}
		}
		if l.current != nil && !(renews && renewed) {
			defer l.mu.Unlock()
			if !l.set.begin() {
				return nil, errEnded
			}
			l.current.users++
			return l.current, nil
		}
		wait := l.opening
		l.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// openOnce tries to open the backup, and to plan the layer. The backup of before stays open after an error.
func (l *Layer) openOnce() {
	b, err := l.open(l.ctx)
	mostPause := l.set.PauseMax
	if api.Is(err, api.Corrupt) { // a heal may follow
		err, mostPause = api.Errorf(api.Unavailable, "%w", err), l.set.HealPauseMax
	}
	if err == nil {
		if err = l.planOnce(b); err != nil {
			err = errors.Join(err, b.Close())
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.opening)
	l.opening = nil
	switch {
	case err != nil && l.current != nil:
		l.delayRenewal()
		return
	case err != nil:
		l.noteFailure(err, mostPause)
		return
	}
	l.drop(false)
	l.current, l.failure, l.pause, l.renew = &openBackup{Backup: b}, nil, 0, time.Time{}
	l.checksum = b.Checksum()
	if l.ended {
		l.drop(l.continues)
	}
}

// planOnce plans the layer, or compares a backup that was opened again with the plan. The caller is the only one.
func (l *Layer) planOnce(b block.Backup) error {
	l.mu.Lock()
	p := l.plan
	l.mu.Unlock()
	if p != nil {
		if b.Size() != p.content {
			return api.Errorf(api.Corrupt, "the backup has %d bytes, and had %d", b.Size(), p.content)
		}
		return nil
	}
	size := planSize(min(b.Size(), api.MaxVolumeSize))
	if err := l.set.reservePlan(l.ctx, l, size); err != nil {
		return err
	}
	p, why, err := newPlan(l.ctx, l.on, b)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unplanned = why
	if p == nil || err != nil || l.ended {
		l.set.releasePlan(l)
		return err
	}
	l.plan = p
	return nil
}

// noteFailure delays the next attempt to open. The caller has mu.
func (l *Layer) noteFailure(err error, mostPause time.Duration) {
	l.pause = min(max(2*l.pause, l.set.PauseMin), mostPause)
	l.failure, l.again = err, time.Now().Add(l.pause)
}

// setIdle notes that the restore waits for the store.
func (l *Layer) setIdle(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idle = why
}

// delayRenewal delays the next opening of a backup with damage. The caller has mu.
func (l *Layer) delayRenewal() {
	l.heal = min(max(2*l.heal, l.set.PauseMin), l.set.HealPauseMax)
	l.renew = time.Now().Add(l.heal)
}

// renewLater delays the next opening of a backup with damage, unless an opening is due already.
func (l *Layer) renewLater() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.renew.IsZero() {
		l.delayRenewal()
	}
}

// noteDamaged notes a damaged chunk, which a reader asks for again. The caller has mu.
func (l *Layer) noteDamaged(number int64, err error) {
	if l.damaged[number] == nil {
		l.set.Log.Error("a chunk of a backup is damaged; reads of it wait", "layer", l.uid, "err", err)
	}
	l.damaged[number] = err
	if l.renew.IsZero() {
		l.delayRenewal()
	}
}

// noteWhole notes a chunk that a reader got. The caller has mu.
func (l *Layer) noteWhole(number int64) {
	if l.damaged[number] == nil {
		return
	}
	if delete(l.damaged, number); len(l.damaged) == 0 {
		l.heal = 0
	}
}

// askNow ends the pause before damaged chunks are asked for again.
func (l *Layer) askNow() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.renew.IsZero() && l.idle == nil && len(l.damaged) == 0 {
		return
	}
	l.renew, l.again, l.heal = time.Now(), time.Now(), 0
	close(l.waits)
	l.waits = make(chan struct{})
}

// awaitAgain waits until the next attempt to open may come.
func (l *Layer) awaitAgain(ctx context.Context) {
	l.mu.Lock()
	at, waits := l.again, l.waits
	if l.current != nil {
		at = l.renew
	}
	l.mu.Unlock()
	t := time.NewTimer(time.Until(at))
	defer t.Stop()
	select {
	case <-t.C:
	case <-waits:
	case <-ctx.Done():
	case <-l.ctx.Done():
	}
}

// release ends a use. After an error other than a damaged chunk, for example the loss of the lock, the next use opens
// the backup again.
func (l *Layer) release(o *openBackup, err error) {
	defer l.set.work.Done()
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.users--; err != nil && l.current == o && !api.Is(err, api.Corrupt) && l.ctx.Err() == nil {
		l.set.Log.Warn("a backup is opened again", "layer", l.uid, "err", err)
		l.noteFailure(err, l.set.PauseMax)
		l.drop(true)
	} else if o.dropped && o.users == 0 {
		l.close(o)
	}
}

// drop gives the open backup up. leave: this process, or the next one, opens the backup again. The caller has mu.
func (l *Layer) drop(leave bool) {
	o := l.current
	if l.current = nil; o == nil {
		return
	}
	o.leave = leave
	if o.dropped = true; o.users == 0 {
		l.close(o)
	}
}

// close closes an unused backup in the background, because the deletion of its lock may take long. The caller has mu.
func (l *Layer) close(o *openBackup) {
	end := o.Close
	if c, is := o.Backup.(block.ContinuedBackup); is && o.leave && l.current == nil &&
		(!l.ended || l.continues) {
		end = c.Leave
	}
	l.set.work.Go(func() { // Start waits: a user or an end is still counted
		if err := end(); err != nil {
			l.set.Log.Warn("a backup cannot be closed", "layer", l.uid, "err", err)
		}
	})
}

// stop ends the service with the process. The caller is counted in Set.work.
func (l *Layer) stop() {
	l.mu.Lock()
	l.continues = true
	l.mu.Unlock()
	l.end()
}

// end ends the service. The caller is counted in Set.work.
func (l *Layer) end() {
	l.mu.Lock()
	l.ended = true
	l.drop(l.continues)
	l.set.releasePlan(l)
	l.mu.Unlock()
	l.cancel()
	l.set.forget(l)
}

// currentPlan returns the plan, or an error of kind Unavailable before there is one.
func (l *Layer) currentPlan() (*plan, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.ended:
		return nil, errEnded
	case l.plan == nil && l.failure != nil:
		return nil, api.Errorf(api.Unavailable, "layer %s: its backup cannot be opened yet: %w", l.uid, l.failure)
	case l.plan == nil:
		return nil, api.Errorf(api.Unavailable, "layer %s: its backup is being opened", l.uid)
	}
	return l.plan, nil
}

// listedChunks bounds the chunks that a message names.
const listedChunks = 10

// damageText names damaged chunks.
func damageText(chunks []int64) string {
	text := make([]string, 0, listedChunks+1)
	for i, c := range chunks {
		if i == listedChunks {
			text = append(text, fmt.Sprintf("and %d more", len(chunks)-i))
			break
		}
		text = append(text, fmt.Sprintf("%d (offset %d)", c, c*block.ChunkSize))
	}
	return strings.Join(text, ", ")
}

// Problem says why reads wait; empty: none does. idle: the restore waits, too, for an unknown time.
func (l *Layer) Problem() (text string, idle bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.idle != nil {
		return l.idle.Error() + "; Drover tries again", true
	}
	return l.explainReads(), false
}

// Unreadable says why the layer of an open backup cannot be read before the restore has finished; empty: it can, or the
// restore tells.
func (l *Layer) Unreadable() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.unplanned == nil {
		return ""
	}
	return "the backup is read whole before it can be used: " + l.unplanned.Error()
}

// explainReads says why reads wait. The caller has mu.
func (l *Layer) explainReads() string {
	if len(l.damaged) > 0 {
		numbers := slices.Sorted(maps.Keys(l.damaged))
		return fmt.Sprintf("the store damaged or lost chunks, whose reads wait: %s: %v", damageText(numbers),
			l.damaged[numbers[0]])
	}
	if l.failure != nil {
		return fmt.Sprintf("the backup cannot be read now; reads wait, and Drover tries again: %v", l.failure)
	}
	return ""
}
