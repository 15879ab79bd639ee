{{- define "spillover.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "spillover.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "spillover.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "spillover.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "spillover.selector" -}}
app.kubernetes.io/name: {{ include "spillover.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "spillover.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "spillover.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "spillover.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "spillover.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "spillover.image" -}}
{{- $variant := ternary "cuda" "cpu" (gt (int .Values.gpu.count) 0) -}}
{{ .Values.image.repository }}:{{ default (printf "%s-%s" .Chart.AppVersion $variant) .Values.image.tag }}
{{- end }}

{{- /* The file given with --config: values.config, and the flags that the chart sets itself. */}}
{{- define "spillover.config" -}}
{{- $name := include "spillover.fullname" . -}}
{{- $hosts := list (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) -}}
{{- $config := deepCopy .Values.config -}}
{{- $_ := set $config "host" "0.0.0.0" -}}
{{- $_ := set $config "port" 8000 -}}
{{- $_ := set $config "allowed-host" (concat $hosts (default (list) (index .Values.config "allowed-host"))) -}}
{{- $_ := set $config "drain-seconds" .Values.shutdown.drainSeconds -}}
{{- $_ := set $config "shutdown-delay-seconds" .Values.shutdown.delaySeconds -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $config "api-key-file" "/etc/spillover/secret/keys" -}}
{{- end -}}
{{- $config | toPrettyJson }}
{{- end }}
