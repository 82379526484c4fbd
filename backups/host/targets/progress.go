package targets

import "sync"

// storeFacts are what a visit knows of the store before it creates objects.
type storeFacts struct {
	format       string // "": not known
	repositoryID string // "": the repository was not opened
	encrypted    bool
	counted      bool // the counts below are known
	backups      int  // in the store
	unlisted     int  // without a Backup
}

// visitProgress is what a running visit told the reconciler of its target.
type visitProgress struct {
	wake func() // wakes the reconciler of the target

	mu    sync.Mutex
	facts *storeFacts // nil: nothing; no report changes
}

// report tells the reconciler what the visit knows.
func (p *visitProgress) report(facts storeFacts) {
	p.mu.Lock()
	p.facts = &facts
	p.mu.Unlock()
	p.wake()
}

// last returns the last report, or nil.
func (p *visitProgress) last() *storeFacts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.facts
}

// reportProgress reports the progress of a visit that creates many objects.
func (v *visit) reportProgress(result *visitResult, create int) {
	result.unlisted = len(v.memory.unlisted)
	if create > quietPull {
		v.progress.report(result.storeFacts)
	}
}
