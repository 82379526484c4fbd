package api

import "slices"

// RecordedImage is what a backup tells of its image: the labels and parameters that a restored image takes over, in any
// cluster.
type RecordedImage struct {
	Labels            map[string]string `json:"labels,omitempty"`
	MinNumberOfCopies int32             `json:"minNumberOfCopies,omitempty"`
	NodeSelector      []string          `json:"nodeSelector,omitempty"`
	DiskSelector      []string          `json:"diskSelector,omitempty"`
}

// RecordImage returns what a backup tells of i.
func RecordImage(i *BackingImage) *RecordedImage {
	s := &i.Spec
	return &RecordedImage{Labels: portableLabels(i.Labels), MinNumberOfCopies: s.MinNumberOfCopies,
		NodeSelector: slices.Clone(s.NodeSelector), DiskSelector: slices.Clone(s.DiskSelector)}
}

// ApplyTo gives a new image the labels and parameters. r may be nil.
func (r *RecordedImage) ApplyTo(i *BackingImage) {
	if r == nil {
		return
	}
	for key, value := range r.Labels {
		if i.Labels == nil {
			i.Labels = map[string]string{}
		}
		i.Labels[key] = value
	}
	i.Spec.MinNumberOfCopies = max(r.MinNumberOfCopies, 1)
	i.Spec.NodeSelector, i.Spec.DiskSelector = slices.Clone(r.NodeSelector), slices.Clone(r.DiskSelector)
}

// Encode is the JSON that ParseRecordedImage reads; empty: r is nil, or larger than a store keeps.
func (r *RecordedImage) Encode() string {
	if r == nil {
		return ""
	}
	return encodeRecord(r)
}

// ParseRecordedImage reads the JSON of a store, where everybody with the password writes; nil: no Drover wrote the
// JSON.
func ParseRecordedImage(text string) *RecordedImage {
	return parseRecord(text, func(r *RecordedImage) {
		r.Labels, r.MinNumberOfCopies = portableLabels(r.Labels), min(max(r.MinNumberOfCopies, 0), mostCopies)
	})
}

// mostCopies bounds the number of copies that a record may ask for: the JSON of a store is not to fill a cluster.
const mostCopies = 100
