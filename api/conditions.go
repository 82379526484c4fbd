package api

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SetCondition sets a condition of an object of generation gen, and reports whether the status or reason changed.
func SetCondition(all *[]metav1.Condition, gen int64, kind string, is bool, reason, message string) bool {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	was := meta.FindStatusCondition(*all, kind)
	changed := was == nil || was.Status != status || was.Reason != reason
	meta.SetStatusCondition(all, metav1.Condition{
		Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: gen})
	return changed
}
