package transfer

// KeptPages is keptPages.
const KeptPages = keptPages

// IndexMemory is the heap that the index of a view takes, in bytes.
func (v *View) IndexMemory() int64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.idx.Memory()
}
