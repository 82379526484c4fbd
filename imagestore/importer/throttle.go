package importer

import "sync"

// maxLead is how far a conversion may read ahead of the checksum.
const maxLead = 16 << 20

// throttle keeps a conversion behind the checksum of its file. The checksum needs one core and often decides the time
// of an import, so a conversion that takes all cores first only makes the import longer.
type throttle struct {
	mu     sync.Mutex
	change *sync.Cond
	at     int64
	ended  bool
}

func newThrottle() *throttle {
	p := &throttle{}
	p.change = sync.NewCond(&p.mu)
	return p
}

// addHashed reports n more hashed bytes.
func (p *throttle) addHashed(n int64) {
	p.mu.Lock()
	p.at += n
	p.mu.Unlock()
	p.change.Broadcast()
}

// endWaits releases every wait.
func (p *throttle) endWaits() {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	p.change.Broadcast()
}

// awaitHash returns once the hash is within maxLead of end, with the number of hashed bytes. awaitHash does not wait
// for a place far ahead: the image is not in the order of its file.
func (p *throttle) awaitHash(end int64) (int64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if end-p.at > 2*scratchTarget {
		return p.at, nil
	}
	for p.at < end-maxLead && !p.ended {
		p.change.Wait()
	}
	return p.at, nil
}
