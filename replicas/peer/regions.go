package peer

import (
	"iter"
	"math/bits"
	"slices"

	"drover.io/drover/api"
)

// Bounds of numbers in a volume.
const (
	// maxRegions is the number of regions of the largest volume, in regions of 16 MiB.
	maxRegions = api.MaxVolumeSize / (16 << 20)
	// maxPieces is how many pieces Changed divides a volume into at most.
	maxPieces = api.MaxVolumeSize / (1 << 20)
)

// run is a range of numbers: the first, and how many.
type run [2]int64

// end is one past the last number.
func (r run) end() int64 { return r[0] + r[1] }

// maxRuns keeps an answer well below the size of a frame.
const maxRuns = 100_000

// runsOf returns the numbers of an ascending list as runs, of which there are at most a given number: beyond it runsOf
// fills gaps, the small ones first. A needless number costs a comparison, and nothing else.
func runsOf(list iter.Seq[int64], most int) []run {
	for gap := int64(1); ; gap *= 2 {
		var runs []run
		for n := range list {
			if k := len(runs) - 1; k >= 0 && n-runs[k].end() < gap {
				runs[k][1] = n - runs[k][0] + 1
				continue
			}
			if len(runs) > most {
				break
			}
			runs = append(runs, run{n, 1})
		}
		if len(runs) <= most {
			return runs
		}
	}
}

// checkRuns refuses runs that are empty, overlap, are out of order, or lie outside [0, count).
func checkRuns(runs []run, count int64) error {
	at := int64(0)
	for _, r := range runs {
		if r[0] < at || r[0] >= count || r[1] <= 0 || r[1] > count-r[0] {
			return api.Errorf(api.Invalid, "the run of %d numbers from %d does not follow %d or exceeds %d", r[1], r[0], at,
				count)
		}
		at = r.end()
	}
	return nil
}

// unrollRuns lists the numbers of checked runs.
func unrollRuns(runs []run) []int64 {
	n := int64(0)
	for _, r := range runs {
		n += r[1]
	}
	list := make([]int64, 0, n)
	for _, r := range runs {
		for i := r[0]; i < r.end(); i++ {
			list = append(list, i)
		}
	}
	return list
}

// regionSet is a set of regions in a frame: as runs, or as a bitmap if a bitmap is shorter. The regions of the largest
// volume are a bitmap of 512 KiB, so every set fits into one frame.
type regionSet struct {
	Runs []run `json:"runs,omitempty"`
	// First is the region of the lowest bit of Bits.
	First int64  `json:"first,omitempty"`
	Bits  []byte `json:"bits,omitempty"`
}

// runText is about how many bytes of JSON a run takes.
const runText = 16

// newRegionSet makes a set of a list in any order.
func newRegionSet(list []int64) (*regionSet, error) {
	s := &regionSet{}
	if len(list) == 0 {
		return s, nil
	}
	if !slices.IsSorted(list) {
		list = slices.Sorted(slices.Values(list))
	}
	first, last := list[0], list[len(list)-1]
	if first < 0 || last >= maxRegions {
		return nil, api.Errorf(api.Invalid, "regions %d to %d: a volume has at most %d", first, last, maxRegions)
	}
	most := int((last-first)/8*4/3/runText) + 1
	for _, g := range list {
		switch k := len(s.Runs) - 1; {
		case k >= 0 && g < s.Runs[k].end():
		case k >= 0 && g == s.Runs[k].end():
			s.Runs[k][1]++
		default:
			s.Runs = append(s.Runs, run{g, 1})
		}
		if len(s.Runs) > most {
			break
		}
	}
	if len(s.Runs) <= most {
		return s, nil
	}
	s.Runs, s.First, s.Bits = nil, first, make([]byte, (last-first)/8+1)
	for _, g := range list {
		s.Bits[(g-first)/8] |= 1 << ((g - first) % 8)
	}
	return s, nil
}

// check refuses a set with regions beyond the largest volume.
func (s *regionSet) check() error {
	if s.First < 0 || s.First >= maxRegions || int64(len(s.Bits)) > (maxRegions-s.First+7)/8 {
		return api.Errorf(api.Invalid, "a bitmap of %d bytes from region %d", len(s.Bits), s.First)
	}
	if len(s.Runs) > 0 && len(s.Bits) > 0 {
		return api.Errorf(api.Invalid, "a set of regions is given twice")
	}
	return checkRuns(s.Runs, maxRegions)
}

// regionsBelow returns the regions of a checked set below count, in ascending order.
func (s *regionSet) regionsBelow(count int64) (list []int64) {
	for _, r := range s.Runs {
		for g := r[0]; g < min(r.end(), count); g++ {
			list = append(list, g)
		}
	}
	for i, b := range s.Bits {
		for ; b != 0; b &= b - 1 {
			if g := s.First + int64(i)*8 + int64(bits.TrailingZeros8(b)); g < count {
				list = append(list, g)
			}
		}
	}
	return list
}
