package importer

import "sync"

// maxLead is how far a conversion may be ahead of the checksum of its source.
const maxLead = 16 << 20

// throttle keeps a conversion from getting ahead of the checksum of the file that it reads. The checksum runs on one
// core and often is what the import takes; a conversion that takes the cores first only lets it end later.
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

// advance says that n more bytes are summed.
func (p *throttle) advance(n int64) {
	p.mu.Lock()
	p.at += n
	p.mu.Unlock()
	p.change.Broadcast()
}

// end lets everything through.
func (p *throttle) end() {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	p.change.Broadcast()
}

// wait returns once the bytes before end are summed, but for the lead, and tells how many are. What is far ahead of
// them is not waited for: the image is not in the order of its file.
func (p *throttle) wait(end int64) (int64, error) {
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
