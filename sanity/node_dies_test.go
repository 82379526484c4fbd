package sanity_test

import "testing"

// nodeDies: all processes of the node die at once, and leave mounts of lost devices behind. The calls of a CO after
// such a crash, the same calls again, bring the data back.
func nodeDies(t *testing.T, w *world) {
	fs, err := w.create("all-die", 400*mib, mountCap("ext4"))
	must(t, err)
	x, err := w.create("all-die-xfs", 400*mib, mountCap("xfs"))
	must(t, err)
	b, err := w.create("all-die-block", 64*mib, blockCap())
	must(t, err)
	do(t, fs.up, x.up, b.up)
	sum, sumx := fs.write("file", 4*mib), x.write("file", 4*mib)
	w.killAll()
	w.start(drover(t))
	do(t, fs.up, x.up, b.up)
	fs.check("file", sum)
	x.check("file", sumx)
	if n := b.total(); n != 64*mib {
		t.Errorf("the block volume has %d bytes", n)
	}
	fs.write("more", mib)
	for _, p := range []*pod{fs, x, b} {
		do(t, p.down, p.remove)
	}
}
